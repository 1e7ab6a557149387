"""Training steps of torch in a Pool and in torch's own allocator, each in a program of its own.

The models are so large that the device always has work, since the speed of Python differs by
several percent from program to program. All programs of a model are there at once, and take turns
of a few steps. So what slows the machine down for a while slows all of them down.
"""

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass

PROGRAM = """
import json, sys, time, warnings
import torch
warnings.simplefilter("ignore")
source, model = sys.argv[1:]
if source:
    import arenapy
    from arenapy import cuda
    from arenapy.interop import torch as arenapy_torch
    arenapy_torch.use(arenapy.Pool(source=eval(source)))
torch.manual_seed(0)
torch.use_deterministic_algorithms(True, warn_only=True)
if model == "blocks":
    net, batches = torch.nn.Linear(1, 1), []
elif model == "transformer":
    layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True)
    net = torch.nn.Sequential(torch.nn.TransformerEncoder(layer, 6), torch.nn.Linear(1024, 1000))
    batches = [torch.randn(32, n, 1024) for n in (64, 96, 128, 80)]
else:
    layers, channels = [], 3
    for width in (64, 128, 256, 512):
        layers += [torch.nn.Conv2d(channels, width, 3, padding=1), torch.nn.BatchNorm2d(width),
                   torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
        channels = width
    net = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.LazyLinear(100))
    net(torch.zeros(2, 3, 64, 64))
    batches = [torch.randn(n, 3, 64, 64) for n in (256, 384, 512, 320)]
net = net.cuda()
batches = [one.cuda() for one in batches]
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
step = 0

def steps(n):
    global step
    losses, seconds = [], []
    for step in range(step, step + n):
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = net(batches[step % 4]).square().mean()
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item().hex())
    step += 1
    return losses, seconds, torch.cuda.memory_reserved()

def empties(n):
    seconds = []
    for n in (512, 64 << 10, 4 << 20) * n:
        start = time.perf_counter()
        for _ in range(1000):
            torch.empty(n, dtype=torch.uint8, device="cuda")
        seconds.append((time.perf_counter() - start) / 1000)
    return [], seconds, torch.cuda.memory_reserved()

kept = torch.empty(4 << 20, dtype=torch.uint8, device="cuda") if model == "blocks" else None
for line in sys.stdin:
    print(json.dumps((empties if model == "blocks" else steps)(int(line))), flush=True)
"""
MODELS = ("transformer", "CNN")
WAYS = {"growing": "cuda.Device(grow=True)", "pool": "cuda.Device()", "native": ""}  # sources
WARM = 8  # steps


@dataclass
class Training:
    """The results of a program."""

    losses: list[str]
    seconds: list[float]  # of each step
    reserved: int  # bytes, at its end


class Program:
    """A program that trains a model in one of the WAYS."""

    def __init__(self, model, way):
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, WAYS[way], model],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.done = Training([], [], 0)

    def train(self, steps):
        """Train so many more steps."""
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the program has ended; see its output")
        losses, seconds, reserved = json.loads(line)
        self.done.losses.extend(losses)
        self.done.seconds.extend(seconds)
        self.done.reserved = max(self.done.reserved, reserved)

    def end(self):
        """End the program."""
        self.process.communicate()


def report(models=("blocks", *MODELS), programs=2, rounds=12, steps=12):
    """Print a line for each model and source: times and memory, as ratios to native torch."""
    for model in models:
        found = {way: [Program(model, way) for _ in range(programs)] for way in WAYS}
        every = [one for way in found.values() for one in way]
        for _ in range(rounds):
            for one in every:
                one.train(steps)
            every.reverse()
        for one in every:
            one.end()
        step = {
            way: statistics.median(
                seconds for one in trained for seconds in one.done.seconds[WARM:]
            )
            for way, trained in found.items()
        }
        reserved = {
            way: max(one.done.reserved for one in trained) for way, trained in found.items()
        }
        for way, source in WAYS.items():
            if not source:
                continue
            same = found[way][0].done.losses == found["native"][0].done.losses
            print(
                f"{model}, {source}: {1e6 * step[way]:.2f} us a step, "
                f"{step[way] / step['native']:.3f} of native; {reserved[way] >> 20} MiB reserved, "
                f"of native {reserved[way] / reserved['native']:.3f}; losses "
                f"{'are the same' if same else 'DIFFER'}",
                flush=True,
            )


if __name__ == "__main__":
    report()
