"""Makes torch_training.npz on a machine with a GPU: the training of a small transformer.

    python asv_benches/gpu/torch_training_trace.py [--longer] [--steps N] [--out FILE]
        [--snapshot FILE]

A decoder of 4 layers, 512 wide, in bfloat16 by autocast, trained with AdamW on random tokens whose
batches vary in size and length; every fourth step is followed by an evaluation without gradients.
torch records its allocator from before the model is made until all is freed, and what is converted
is that record, so parameters, optimizer state and cuBLAS's workspace are in the trace. Seeds are
fixed: another run makes the same sizes in the same order, with the same torch. It is imported late,
since asv imports every file here.

With --longer it makes torch_longer.npz. Each batch has 16 sequences, and they are longer in each
step, as in a training that goes from short texts to long ones.
"""

import argparse
import sys
from pathlib import Path

if not __package__:  # run as a script; behind what is installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import numpy as np

from arenapy import trace
from asv_benches.gpu.traces import LONGER, TRAINING, pack

LAYERS, WIDTH, HEADS, VOCABULARY, LONGEST = 4, 512, 8, 8192, 256
BATCHES, SHORTEST = (4, 32), 64
STEPS = 12
LONGER_BATCH, LONGER_FIRST, LONGER_BY = 16, 128, 64  # sequences; tokens, and more in each step
MAX_FILE_BYTES = 300_000


def decoder(longest=LONGEST):
    """A model that gives the loss of predicting the next token."""
    from torch import nn
    from torch.nn import functional as F

    class Layer(nn.Module):
        """Attention, then two linear layers, each around a residual."""

        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
            self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
            self.drop = nn.Dropout(0.1)

        def forward(self, x):
            """Of x: batch, length, width."""
            batch, length, _ = x.shape
            heads = self.mix(self.norms[0](x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
            heads = heads.permute(2, 0, 3, 1, 4).unbind(0)
            mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH)))
            return x + self.drop(self.down(F.gelu(self.up(self.norms[1](x)))))

    class Decoder(nn.Module):
        """Tokens and places in, a distribution of tokens out."""

        def __init__(self):
            super().__init__()
            self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(longest, WIDTH)
            self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

        def forward(self, tokens):
            """The loss."""
            x = self.tokens(tokens[:, :-1])
            x = x + self.places.weight[: x.shape[1]]
            logits = self.head(self.norm(self.layers(x)))
            return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return Decoder()


def lengths(step):
    """Of the sequences in a batch, if they become longer."""
    return LONGER_FIRST + LONGER_BY * step


def batch(random, device, longer_at=None):
    """Tokens, as a data loader brings them.

    longer_at : the step, if sequences become longer with each
    """
    import torch

    if longer_at is None:
        size = random.integers(*BATCHES, endpoint=True)
        length = random.integers(SHORTEST, LONGEST)
    else:
        size, length = LONGER_BATCH, lengths(longer_at)
    return torch.from_numpy(random.integers(0, VOCABULARY, (size, length))).to(device)


def train(steps, device="cuda", longer=False):
    """The losses."""
    import torch

    torch.manual_seed(14)
    random = np.random.default_rng(14)
    model = decoder(lengths(steps) if longer else LONGEST).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses = []
    for step in range(steps):
        at = step if longer else None
        with torch.autocast(device, torch.bfloat16):
            loss = model(batch(random, device, at))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if step % 4 == 3:
            model.eval()
            with torch.no_grad(), torch.autocast(device, torch.bfloat16):
                losses.append(model(batch(random, device, at)).item())
            model.train()
    return losses


def main():
    """Train, convert, write; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--longer", action="store_true", help="ever longer sequences")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--snapshot", metavar="FILE", help="torch's own file too")
    options = parser.parse_args()
    out = options.out or (LONGER if options.longer else TRAINING)
    import torch

    torch.cuda.init()
    torch.cuda.memory._record_memory_history(context=None, max_entries=10_000_000)
    losses = train(options.steps, longer=options.longer)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_reserved(), torch.cuda.memory_stats()["requested_bytes.all.peak"]
    made = trace.from_torch(torch.cuda.memory._snapshot())
    if options.snapshot:
        torch.cuda.memory._dump_snapshot(options.snapshot)
    out.parent.mkdir(parents=True, exist_ok=True)
    pack(made, out)
    size = out.stat().st_size
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    print(f"losses {', '.join(f'{loss:.3f}' for loss in losses)}")
    print(made.summary())
    print(f"peak: {peak[0]} bytes reserved, {peak[1]} requested, as torch counts them")
    print(f"{out}: {size} bytes")
    if size > MAX_FILE_BYTES:
        print(f"that is more than {MAX_FILE_BYTES}: give fewer --steps", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
