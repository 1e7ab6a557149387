"""Ten programs as people write them, with public libraries, each of a fixed seed.

Each function prepares its data and returns a step, which does the work and returns a checksum: the
same one with every allocator. `scale` is the share of the usual size of the data. Imports of what
not everybody has are in the functions.
"""

from itertools import pairwise

import numpy as np

__all__ = ["WORKLOADS"]


def side(usual, scale):
    """The side of a square with that share of the usual area."""
    return max(16, round(usual * scale**0.5))


def count(usual, scale):
    """A number of elements, scaled; at least 64."""
    return max(64, round(usual * scale))


def image_filters(scale=1.0):
    """Denoise, sharpen, find edges: SciPy's filters and NumPy between them."""
    from scipy import ndimage

    n = side(2400, scale)
    image = np.random.default_rng(1).random((n, n), "f4")

    def step():
        smooth = ndimage.gaussian_filter(image, 1.5)
        sharp = np.clip(image + 0.7 * (image - smooth), 0, 1)
        edges = np.hypot(ndimage.sobel(sharp, 0), ndimage.sobel(sharp, 1))
        local = ndimage.uniform_filter(edges, 15)
        spread = np.sqrt(np.maximum(ndimage.uniform_filter(edges * edges, 15) - local**2, 0))
        mask = edges > local + 0.5 * spread
        return float(np.where(mask, sharp, smooth).sum(dtype="f8"))

    return step


def pandas_join(scale=1.0):
    """Orders joined with customers, grouped, aggregated and ranked."""
    import pandas as pd

    rng = np.random.default_rng(2)
    n, people = count(600_000, scale), count(20_000, scale)
    orders = pd.DataFrame(
        {
            "customer": rng.integers(0, people, n),
            "price": rng.gamma(2, 30, n),
            "quantity": rng.integers(1, 9, n),
            "day": rng.integers(0, 365, n),
        }
    )
    customers = pd.DataFrame(
        {"customer": np.arange(people), "region": rng.integers(0, 50, people)},
    )

    def step():
        table = orders.merge(customers, on="customer")
        table["total"] = table["price"] * table["quantity"]
        by_day = table.groupby(["region", "day"])["total"].agg(["sum", "mean", "max"])
        share = table["total"] / table.groupby("customer")["total"].transform("sum")
        best = by_day.sort_values("sum").tail(1000)
        return float(best["sum"].sum() + by_day["mean"].sum() + share.sum())

    return step


def sklearn_clusters(scale=1.0):
    """Standardize, PCA, then k-means."""
    from sklearn.cluster import KMeans
    from sklearn.decomposition import PCA
    from sklearn.preprocessing import StandardScaler

    rng = np.random.default_rng(3)
    n = count(150_000, scale)
    data = rng.normal(size=(n, 32)) + 3 * rng.integers(0, 4, (n, 1))

    def step():
        scaled = StandardScaler().fit_transform(data)
        parts = PCA(8, svd_solver="covariance_eigh").fit_transform(scaled)
        found = KMeans(8, init=parts[:8], n_init=1, max_iter=5, tol=0).fit(parts)
        return float(found.inertia_)

    return step


def n_body(scale=1.0):
    """One step of so many bodies, all pairs at once."""
    rng = np.random.default_rng(4)
    n = side(1000, scale)
    first = rng.normal(size=(n, 3))
    mass = rng.uniform(0.5, 2, n)

    def step():
        difference = first[:, None, :] - first[None, :, :]
        distance = np.sqrt((difference**2).sum(axis=-1) + 1e-3)
        pull = -(mass[None, :, None] * difference / distance[..., None] ** 3).sum(axis=1)
        speed = 1e-3 * pull
        position = first + 1e-3 * speed
        energy = 0.5 * (mass * (speed**2).sum(axis=1)).sum() - (mass / distance).sum()
        return float(energy + position.std())

    return step


def heat(scale=1.0):
    """Five explicit steps of the heat equation in two dimensions."""
    n = side(1600, scale)
    start = np.random.default_rng(5).random((n, n))

    def step():
        u = start.copy()
        for _ in range(5):
            laplace = u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1]
            new = u.copy()
            new[1:-1, 1:-1] = u[1:-1, 1:-1] + 0.2 * laplace
            u = new
        return float((u * u).sum())

    return step


def fft_convolution(scale=1.0):
    """An image convolved with a large kernel, by FFT."""
    rng = np.random.default_rng(6)
    n = side(1500, scale)
    image, kernel = rng.random((n, n)), rng.random((65, 65))
    shape = [m + 64 for m in image.shape]

    def step():
        product = np.fft.rfft2(image, shape) * np.fft.rfft2(kernel / kernel.sum(), shape)
        return float(np.abs(np.fft.irfft2(product, shape)).sum())

    return step


def black_scholes(scale=1.0):
    """Prices and deltas of options."""
    from scipy.special import ndtr

    rng = np.random.default_rng(7)
    n = count(1_000_000, scale)
    spot, strike = rng.uniform(50, 150, (2, n))
    years, volatility = rng.uniform(0.1, 2, n), rng.uniform(0.1, 0.6, n)

    def step():
        root = volatility * np.sqrt(years)
        d1 = (np.log(spot / strike) + (0.02 + 0.5 * volatility**2) * years) / root
        d2 = d1 - root
        discounted = strike * np.exp(-0.02 * years)
        call = spot * ndtr(d1) - discounted * ndtr(d2)
        put = call - spot + discounted
        return float(call.sum() + put.sum() + ndtr(d1).sum())

    return step


def network(scale=1.0):
    """A perceptron of three layers in NumPy: two steps of gradient descent."""
    rng = np.random.default_rng(8)
    widths = (784, 1024, 512, 10)
    start = [rng.normal(0, 0.05, pair).astype("f4") for pair in pairwise(widths)]
    batches = rng.random((2, count(1024, scale), 784), "f4")
    labels = rng.integers(0, 10, batches.shape[:2])

    def step():
        weights, loss = start, 0.0
        for batch, label in zip(batches, labels, strict=True):
            kept = [batch]
            for matrix in weights[:-1]:
                kept.append(np.maximum(kept[-1] @ matrix, 0))
            scores = kept[-1] @ weights[-1]
            scores = np.exp(scores - scores.max(axis=1, keepdims=True))
            scores /= scores.sum(axis=1, keepdims=True)
            rows = np.arange(len(label))
            loss -= float(np.log(scores[rows, label]).sum(dtype="f8"))
            back = scores.copy()
            back[rows, label] -= 1
            new = []
            for matrix, layer in zip(reversed(weights), reversed(kept), strict=True):
                new.insert(0, matrix - (0.01 / len(label)) * (layer.T @ back))
                back = (back @ matrix.T) * (layer > 0)
            weights = new
        return loss

    return step


def climate(scale=1.0):
    """Reductions over labelled axes, as xarray has them: climatology, anomalies, means."""
    rng = np.random.default_rng(9)
    data = rng.normal(15, 8, (count(730, scale), 72, 144)).astype("f4")
    data[rng.random(data.shape) < 0.01] = np.nan
    month = np.arange(len(data)) // 30 % 12
    weights = np.cos(np.linspace(-1.5, 1.5, data.shape[1]))[:, None]

    def step():
        normal = np.stack([np.nanmean(data[month == m], axis=0) for m in np.unique(month)])
        anomaly = data - normal[np.searchsorted(np.unique(month), month)]
        spread = np.nanstd(anomaly, axis=0)
        valid = np.isfinite(data)
        sums = np.where(valid, data * weights, 0).sum(axis=(1, 2))
        means = sums / (valid * weights).sum(axis=(1, 2))
        running = np.cumsum(np.where(valid, anomaly, 0), axis=0, dtype="f8")
        smooth = (running[30:] - running[:-30]) / 30
        return float(means.sum() + spread.sum() + np.abs(smooth).sum())

    return step


def parsing(scale=1.0):
    """Numbers from text, a table made of them, and a summary."""
    rng = np.random.default_rng(10)
    text = " ".join(f"{value:.6f}" for value in rng.uniform(1, 100, count(400_000, scale)))

    def step():
        values = np.fromstring(text, sep=" ")
        table = values[: len(values) // 8 * 8].reshape(-1, 8)
        scaled = (table - table.mean(axis=0)) / table.std(axis=0)
        order = np.argsort(scaled[:, 0], kind="stable")
        return float(np.abs(scaled[order]).sum() + values.sum())

    return step


#: By the name in the table.
WORKLOADS = {
    function.__name__: function
    for function in (
        image_filters,
        pandas_join,
        sklearn_clusters,
        n_body,
        heat,
        fft_convolution,
        black_scholes,
        network,
        climate,
        parsing,
    )
}
