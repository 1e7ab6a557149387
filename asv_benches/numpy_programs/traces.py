"""Traces of three programs under arenapy's handler, and what allocators reserve to repeat them.

An image pipeline in NumPy, a fit with scikit-learn, and the training of a small transformer in
NumPy whose batches vary in size. Each is recorded in this process; `arenapy replay` repeats it in
one process for each allocator and writes every page, so that reserved means resident.

What this does not show: zeros of 32 MiB and more, which are mapped lazily, outside the pool, and so
are in no trace; and what is not NumPy's, such as the models' own C memory.
"""

import gc
import tempfile
from pathlib import Path

import numpy as np

import arenapy
from arenapy import trace
from arenapy.commands.replay.command import replay
from asv_benches.support.rounds import Line

PEERS = ("jemalloc", "mimalloc")
SHOWN = ("tcmalloc", "malloc")
LEAST_PEAK = 256 << 20
MAX_RATIO = 1.15
MAX_OF_BEST = 1.05


def images(scale):
    """Photos of various sizes: blurred, sharpened, halved, and their histograms; some are kept."""
    rng = np.random.default_rng(11)
    kept, total = [], 0.0
    for _ in range(24):
        height, width = (rng.uniform(0.5, 1.5, 2) * 2400 * scale**0.5).astype(int)
        photo = rng.random((height, width, 3), "f4")
        blurred = photo
        for axis in (0, 1):
            blurred = (np.roll(blurred, 1, axis) + blurred + np.roll(blurred, -1, axis)) / 3
        sharp = np.clip(photo + 0.6 * (photo - blurred), 0, 1)
        gray = sharp @ np.array([0.299, 0.587, 0.114], "f4")
        edges = np.hypot(*np.gradient(gray))
        half = sharp[: height // 2 * 2, : width // 2 * 2]
        half = half.reshape(height // 2, 2, width // 2, 2, 3).mean(axis=(1, 3))
        kept = [*kept[-5:], (half * 255).astype("u1"), np.histogram(edges, 256)[0]]
        total += float(edges.mean())
    return total


def fit(scale):
    """Standardize, PCA, k-means and a regression with cross-validation."""
    from sklearn.cluster import KMeans
    from sklearn.decomposition import PCA
    from sklearn.linear_model import Ridge
    from sklearn.model_selection import cross_val_score
    from sklearn.preprocessing import StandardScaler

    rng = np.random.default_rng(12)
    data = rng.normal(size=(round(220_000 * scale), 64))
    wanted = data @ rng.normal(size=64) + rng.normal(size=len(data))
    scaled = StandardScaler().fit_transform(data)
    parts = PCA(16, svd_solver="covariance_eigh").fit_transform(scaled)
    groups = KMeans(8, n_init=1, max_iter=5, random_state=0).fit(parts)
    scores = cross_val_score(Ridge(), scaled, wanted, cv=4)
    return float(scores.mean() + groups.inertia_)


def attention(x, weights):
    """One layer forward, and what its way back needs."""
    q, k, v = (x @ w for w in weights[:3])
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(np.float32(q.shape[-1]))
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    mixed = scores @ v
    hidden = np.maximum((x + mixed) @ weights[3], 0)
    return x + mixed + hidden @ weights[4], (x, q, k, v, scores, mixed, hidden)


def attention_back(grad, weights, kept):
    """The gradients of its input and weights."""
    x, q, k, v, scores, mixed, hidden = kept
    root = np.sqrt(np.float32(q.shape[-1]))

    def outer(a, b):
        return np.einsum("bti,btj->ij", a, b, optimize=True)

    grad_hidden = (grad @ weights[4].T) * (hidden > 0)
    grads = [None, None, None, outer(x + mixed, grad_hidden), outer(hidden, grad)]
    grad_mixed = grad + grad_hidden @ weights[3].T
    grad_scores = grad_mixed @ v.swapaxes(-1, -2)
    grad_scores = scores * (grad_scores - (grad_scores * scores).sum(axis=-1, keepdims=True))
    grad_q, grad_k = grad_scores @ k / root, grad_scores.swapaxes(-1, -2) @ q / root
    grad_v = scores.swapaxes(-1, -2) @ grad_mixed
    grads[:3] = outer(x, grad_q), outer(x, grad_k), outer(x, grad_v)
    back = zip((grad_q, grad_k, grad_v), weights, strict=False)
    return grad_mixed + sum(one @ matrix.T for one, matrix in back), grads


def train(scale):
    """A transformer: batches of various sizes and lengths, gradients by hand, Adam."""
    rng = np.random.default_rng(13)
    width, layers = 128, 4
    shapes = [(width, width)] * 3 + [(width, 4 * width), (4 * width, width)]
    model = [[rng.normal(0, 0.05, s).astype("f4") for s in shapes] for _ in range(layers)]
    moments = [[(np.zeros_like(w), np.zeros_like(w)) for w in layer] for layer in model]
    total = 0.0
    for t in range(1, 25):
        batch, length = rng.integers(4, 33), round(rng.integers(64, 321) * scale**0.5)
        x = rng.normal(size=(batch, length, width)).astype("f4")
        wanted = np.roll(x, 1, axis=1)
        kept = []
        for weights in model:
            x, memory = attention(x, weights)
            kept.append(memory)
        grad = (x - wanted) * np.float32(2 / x.size)
        total += float(((x - wanted) ** 2).mean())
        for layer in reversed(range(layers)):
            grad, grads = attention_back(grad, model[layer], kept.pop())
            for i, (weight, one) in enumerate(zip(model[layer], grads, strict=True)):
                first, second = moments[layer][i]
                first = 0.9 * first + 0.1 * one
                second = 0.999 * second + 0.001 * one**2
                moments[layer][i] = first, second
                step = first / (1 - 0.9**t) / (np.sqrt(second / (1 - 0.999**t)) + 1e-8)
                model[layer][i] = (weight - 1e-3 * step).astype("f4")
    return total


PROGRAMS = {"image pipeline": images, "scikit-learn fit": fit, "transformer training": train}


def recorded(program, scale, path):
    """The Trace of a program's arrays."""
    pool = arenapy.Pool()
    with trace.record(pool, path), arenapy.numpy_memory(pool):
        program(scale)
        gc.collect()
    return trace.load(path)


def traces(quick=False):
    """{program: the Results of its replays}."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, program in PROGRAMS.items():
            made = recorded(program, 0.1 if quick else 1.0, Path(folder) / "numpy.trace")
            found[name] = replay(made, ["pool", *PEERS, *SHOWN])
            peak = found[name][0].peak_live
            if peak < LEAST_PEAK and not quick:
                raise AssertionError(f"{name}: only {peak} bytes were ever live; make it larger")
    return found


def trace_lines(found):
    """The report's lines about the replays."""
    for program, results in found.items():
        ratios = {one.name: one.ratio for one in results if one.ratio is not None}
        peak = results[0].peak_live / 2**20
        yield Line("traces", f"{program}: peak live", peak, "MiB")
        for name, ratio in ratios.items():
            limit = MAX_RATIO if name == "pool" else None
            what = f"{program}: peak reserved / peak live, {name}"
            yield Line("traces", what, ratio, "x", limit, timed=False)
        for one in results:
            if one.fragmentation is not None:
                what = f"{program}: of it in no live block, {one.name}"
                yield Line("traces", what, 100 * one.fragmentation, "%")
        best = min((ratios[name] for name in PEERS if name in ratios), default=None)
        if best is not None and "pool" in ratios:
            what = f"{program}: pool / the best of {' and '.join(PEERS)}"
            yield Line("traces", what, ratios["pool"] / best, "x", MAX_OF_BEST, timed=False)


def lines(quick):
    """The report's lines."""
    yield from trace_lines(traces(quick))
