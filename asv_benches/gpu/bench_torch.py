"""Training steps of torch in a Pool and in torch's own allocator, each in a program of its own."""

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass

PROGRAM = """
import json, sys, time
import torch
way, model, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
if way == "pool":
    import arenapy
    from arenapy import cuda
    from arenapy.interop import torch as arenapy_torch
    arenapy_torch.use(arenapy.Pool(source=cuda.Device()))
torch.manual_seed(0)
torch.use_deterministic_algorithms(True, warn_only=True)
if model == "blocks":
    sizes = (512, 64 << 10, 4 << 20)
    kept = [torch.empty(n, dtype=torch.uint8, device="cuda") for n in sizes]
    seconds = []
    for n in sizes * steps:
        start = time.perf_counter()
        for _ in range(1000):
            torch.empty(n, dtype=torch.uint8, device="cuda")
        seconds.append((time.perf_counter() - start) / 1000)
    print(json.dumps([[], seconds, torch.cuda.memory_reserved()]))
    sys.exit()
if model == "transformer":
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    net = torch.nn.Sequential(torch.nn.TransformerEncoder(layer, 6), torch.nn.Linear(512, 1000))
    batches = [torch.randn(16, n, 512) for n in (64, 96, 128, 80)]
else:
    layers, channels = [], 3
    for width in (64, 128, 256, 512):
        layers += [torch.nn.Conv2d(channels, width, 3, padding=1), torch.nn.BatchNorm2d(width),
                   torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
        channels = width
    net = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.LazyLinear(100))
    net(torch.zeros(2, 3, 64, 64))
    batches = [torch.randn(n, 3, 64, 64) for n in (32, 48, 64, 40)]
net = net.cuda()
batches = [one.cuda() for one in batches]
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
losses, seconds = [], []
for step in range(steps):
    torch.cuda.synchronize()
    start = time.perf_counter()
    optimizer.zero_grad(set_to_none=True)
    loss = net(batches[step % 4]).square().mean()
    loss.backward()
    optimizer.step()
    torch.cuda.synchronize()
    seconds.append(time.perf_counter() - start)
    losses.append(float(loss).hex())
print(json.dumps([losses, seconds, torch.cuda.memory_reserved()]))
"""
MODELS = ("transformer", "CNN")
WARM = 8  # steps


@dataclass(frozen=True)
class Training:
    """The results of a program."""

    losses: list[str]
    seconds: list[float]  # of each step
    reserved: int  # bytes, at its end


def in_a_program(model, way, steps):
    """Train so many steps; `way` is "pool" or "native"."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, way, model, str(steps)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    return Training(*json.loads(done.stdout))


def report(rounds=2, steps=80):
    """Print a line for each model: times and memory, as ratios to native torch."""
    for model in ("blocks", *MODELS):
        found = {"pool": [], "native": []}
        for _ in range(rounds):
            for way, trainings in found.items():
                trainings.append(in_a_program(model, way, steps))
        step = {
            way: statistics.median(
                seconds for training in trainings for seconds in training.seconds[WARM:]
            )
            for way, trainings in found.items()
        }
        reserved = {
            way: max(training.reserved for training in trainings)
            for way, trainings in found.items()
        }
        same = found["pool"][0].losses == found["native"][0].losses
        print(
            f"{model}: {1e6 * step['pool']:.2f} us a step, {step['pool'] / step['native']:.3f} of "
            f"native; {reserved['pool'] >> 20} MiB reserved, of native "
            f"{reserved['pool'] / reserved['native']:.3f}; losses "
            f"{'are the same' if same else 'DIFFER'}",
            flush=True,
        )


if __name__ == "__main__":
    report()
