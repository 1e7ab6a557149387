"""Simulate particles that attract each other. An arena has the temporary arrays of each step.

    python simulation.py [STEPS]

The particles live for all steps. They are a struct of arrays: first all x, then all y, and so on.
The temporary arrays live for one step. The step allocates them inside a scope of the arena. An
allocation moves a cursor, and the end of the scope moves it back. So the next step uses the same
memory again, and takes no memory from the system.
"""

import sys

import numpy as np

import arenapy

FIELDS = {"x": "f8", "y": "f8", "vx": "f8", "vy": "f8", "mass": "f8"}
SOFT = 1e-2  # limits the force between two particles that are very close


def particles(arena, n, seed=1):
    """Make a cloud of particles at rest."""
    random = np.random.default_rng(seed)
    cloud = arena.struct_of_arrays(FIELDS, n)
    cloud["x"][:], cloud["y"][:] = random.normal(size=(2, n))
    cloud["vx"][:] = cloud["vy"][:] = 0
    cloud["mass"][:] = random.uniform(0.5, 1.5, n) / n
    return cloud


def accelerate(cloud, arena, seconds):
    """Change the speeds by the attraction between all particles."""
    n = len(cloud["x"])
    dx, dy, pull = arena.empty((3, n, n))
    np.subtract(cloud["x"], cloud["x"][:, None], out=dx)
    np.subtract(cloud["y"], cloud["y"][:, None], out=dy)
    square = arena.empty((n, n))
    np.multiply(dx, dx, out=pull)
    np.multiply(dy, dy, out=square)
    pull += square
    pull += SOFT**2
    np.power(pull, -1.5, out=pull)
    pull *= cloud["mass"]
    for speed, distance in (("vx", dx), ("vy", dy)):
        distance *= pull
        change = distance.sum(axis=1, out=arena.empty(n))
        change *= seconds
        cloud[speed] += change


def step(cloud, arena, seconds=1e-3):
    """Compute one step with the leapfrog method."""
    for place, speed in (("x", "vx"), ("y", "vy")):
        cloud[place] += seconds / 2 * cloud[speed]
    with arena.scope():  # its end frees the arrays that accelerate() made
        accelerate(cloud, arena, seconds)
    for place, speed in (("x", "vx"), ("y", "vy")):
        cloud[place] += seconds / 2 * cloud[speed]


def main(steps, n=400):
    """Run the simulation, and print its time, allocations and page faults."""
    arena = arenapy.Bump(64 << 20)
    cloud = particles(arena, n)
    step(cloud, arena)
    with arenapy.measure(arena) as m:
        for _ in range(steps):
            step(cloud, arena)
    energy = float((cloud["mass"] * (cloud["vx"] ** 2 + cloud["vy"] ** 2)).sum()) / 2
    print(f"{steps} steps of {n} particles in {m.seconds:.2f} s, kinetic energy {energy:.4f}")
    print(f"{m.allocations} allocations, {m.faults} page faults; {arena}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
