"""torch's tensors in a Pool: each test is a program of its own, whose allocator is the Pool's."""

import subprocess
import sys
import textwrap

import pytest
from real_gpu import output_of

pytestmark = pytest.mark.usefixtures("torch")

START = """
import arenapy, torch
from arenapy import cuda
from arenapy.interop import torch as arenapy_torch
pool = arenapy.Pool({limit}, cuda.Device())
arenapy_torch.use(pool)
"""


def program(text, limit=None):
    """What a program prints, whose lines begin like this one's."""
    return output_of(START.format(limit=limit) + textwrap.dedent(text))


def test_tensors_are_in_the_pool():
    program("""
        x = torch.arange(1 << 20, device="cuda")
        assert pool.stats().active_allocations == 1
        (block,) = [one for one in pool.blocks() if one.state == "live"]
        assert block.address == x.data_ptr()
        assert int(x.sum()) == (1 << 20) * ((1 << 20) - 1) // 2
        address = x.data_ptr()
        del x
        assert torch.empty(1 << 20, dtype=torch.int64, device="cuda").data_ptr() == address
        pool.check()
    """)


def test_figures():
    program("""
        x = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_allocated() == 8 << 20
        assert torch.cuda.memory_reserved() == pool.stats().reserved_bytes >= 8 << 20
        del x
        assert torch.cuda.memory_allocated() == 0
        assert torch.cuda.max_memory_allocated() == 8 << 20
        most = torch.cuda.max_memory_reserved()
        assert most == torch.cuda.memory_reserved() >= 8 << 20
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0
        assert torch.cuda.max_memory_reserved() == most
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == torch.cuda.max_memory_reserved() == 0
        assert torch.cuda.memory_stats()["num_ooms"] == 0
        assert "Active memory" in torch.cuda.memory_summary()
    """)


def test_out_of_memory_is_torchs():
    program(
        """
        kept = torch.empty(20 << 20, dtype=torch.uint8, device="cuda")
        for _ in range(3):
            try:
                torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError as error:
                assert "104857600 bytes do not fit into the pool" in str(error), error
                assert "max_bytes=67108864" in str(error), error
            else:
                raise SystemExit("it was not raised")
        assert torch.empty(20 << 20, dtype=torch.uint8, device="cuda").data_ptr()
        x = torch.ones(1000, device="cuda", requires_grad=True)

        class Greedy(torch.autograd.Function):
            @staticmethod
            def forward(context, x):
                return x.clone()

            @staticmethod
            def backward(context, gradient):
                torch.empty(100 << 20, dtype=torch.uint8, device="cuda")

        try:
            Greedy.apply(x).sum().backward()
        except torch.OutOfMemoryError as error:
            assert "do not fit" in str(error)
        else:
            raise SystemExit("it was not raised in the backward pass")
        """,
        limit=64 << 20,
    )


def test_streams_and_record_stream():
    """Bytes that another stream reads late are nobody else's, if record_stream has said so."""
    program("""
        side = torch.cuda.Stream()
        wrong = 0
        for i in range(200):
            x = torch.full((1 << 20,), i, dtype=torch.int32, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(200_000)
                y = x.clone()
                x.record_stream(side)
            del x
            torch.full((1 << 20,), -1, dtype=torch.int32, device="cuda")
            torch.cuda.current_stream().wait_stream(side)
            wrong += int((y != i).sum())
            del y
        assert wrong == 0, wrong
        pool.check()
        torch.cuda.synchronize()
        pool.stats()
        assert pool.stats().pending_bytes == 0
        assert pool.stats().allocated_bytes == 0
    """)


def test_without_record_stream_it_is_overwritten():
    """So the test above can fail."""
    assert int(program("""
        side = torch.cuda.Stream()
        wrong = 0
        for i in range(50):
            x = torch.full((1 << 20,), i, dtype=torch.int32, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(200_000)
                y = x.clone()
            del x
            torch.full((1 << 20,), -1, dtype=torch.int32, device="cuda")
            torch.cuda.current_stream().wait_stream(side)
            wrong += int((y != i).sum())
        print(wrong)
    """)) > 0  # fmt: skip


def test_many_streams_and_threads():
    program("""
        import threading
        wrong = []

        def work(number):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for i in range(300):
                    tensors = [torch.full((n,), number * 1000 + i, device="cuda")
                               for n in (100, 5000, 300_000)]
                    for x in tensors:
                        if int((x != number * 1000 + i).sum()):
                            wrong.append((number, i))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
        for one in threads: one.start()
        for one in threads: one.join()
        assert not wrong, wrong[:3]
        assert pool.stats().allocated_bytes == 0
        pool.check()
    """)


def test_a_graph_of_what_exists():
    program("""
        x, y = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.add(x, 1, out=y)
            x.copy_(y)
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        assert float(x[0]) == 5
        assert float((x + 1)[0]) == 6
    """)


def test_a_graph_of_tensors_that_are_made_in_it():
    """1,000 replays, while the program makes tensors of the same sizes and fills them."""
    program("""
        x = torch.zeros(1 << 18, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                y = (x + 1) * 2 - 3
            z = y + x
            x += 1
        live = pool.stats()
        assert live.pending_bytes <= 4 * x.nbytes, live
        assert live.pending_bytes > 0
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for i in range(1000):
            graph.replay()
            wrong += (y != 2 * i - 1).sum() + (z != 3 * i - 1).sum()
            others = [torch.full((1 << 18,), -9.0, device="cuda") for _ in range(4)]
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                more = [torch.full((1 << 18,), -8.0, device="cuda") for _ in range(4)]
            del others, more
            if i % 250 == 0:
                torch.cuda.empty_cache()
        assert int(wrong) == 0
        del y, z
        torch.cuda.synchronize()
        assert pool.stats().pending_bytes >= 2 * x.nbytes
        graph.reset()
        del graph
        torch.cuda.synchronize()
        import time
        end = time.monotonic() + 20
        while pool.stats().pending_bytes and time.monotonic() < end:
            time.sleep(0.01)
        assert pool.stats().pending_bytes == 0
        pool.check()
    """)


def test_a_training_step_as_a_graph():
    """Forward, backward and optimizer: the losses are those without a graph, bit for bit."""
    text = """
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.randn(64, 256, device="cuda")

        def step():
            optimizer.zero_grad(set_to_none=True)
            loss = model(data).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            losses = [float(step()) for _ in range(3)]
        torch.cuda.current_stream().wait_stream(side)
        if {graph}:
            graph = torch.cuda.CUDAGraph()
            optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph):
                static = step()
            for _ in range(20):
                graph.replay()
                losses.append(float(static))
                torch.full((1 << 20,), -1.0, device="cuda")
        else:
            losses += [float(step()) for _ in range(20)]
        print(losses)
    """
    assert program(text.replace("{graph}", "True")) == program(text.replace("{graph}", "False"))


def test_too_late():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent("""
            import arenapy, torch
            from arenapy import cuda
            from arenapy.interop import raw_blocks
            from arenapy.interop import torch as arenapy_torch
            x = torch.zeros(1, device="cuda")
            pool = arenapy.Pool(source=cuda.Device())
            try:
                arenapy_torch.use(pool)
            except RuntimeError as error:
                assert "before the first CUDA tensor" in str(error)
            assert raw_blocks.pools_in_use() == {}
            assert torch.cuda.memory_allocated() == 512
        """)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_scope():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent("""
            import gc
            import arenapy, torch
            from arenapy import cuda
            from arenapy.interop import torch as arenapy_torch
            outside = torch.zeros(1000, device="cuda")
            pool = arenapy.Pool(source=cuda.Device())
            scope = arenapy_torch.mem_pool(pool)
            with torch.cuda.use_mem_pool(scope):
                x = torch.ones(10 << 20, device="cuda")
            assert pool.stats().allocated_bytes >= 40 << 20
            (y,) = [one for one in pool.blocks() if one.state == "live"]
            assert y.address <= x.data_ptr() < y.address + y.nbytes
            assert float(x.sum()) == 10 << 20
            del x, scope
            gc.collect()
            torch.cuda.empty_cache()
            assert pool.stats().allocated_bytes == 0, pool.stats().allocated_bytes
            pool.check()
        """)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_training_is_bit_for_bit():
    """A transformer and a CNN: the losses of native torch, in at most its memory if blocks merge
    across growth, else in about as much."""
    from asv_benches.gpu import bench_torch

    for model in bench_torch.MODELS:
        programs = [bench_torch.Program(model, way) for way in ("native", "pool", "growing")]
        for program in programs:
            program.train(8)
            program.end()
        native, pool, growing = (program.done for program in programs)
        assert pool.losses == growing.losses == native.losses
        assert growing.reserved <= native.reserved, (model, growing.reserved, native.reserved)
        assert pool.reserved <= 1.1 * native.reserved, (model, pool.reserved, native.reserved)


LOADER = """
    import arenapy, torch
    from arenapy.interop import torch as arenapy_torch, torch_batches
    from torch.utils.data import DataLoader

    {before}
    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 1600

        def __getitem__(self, i):
            return torch.full((1 << 16,), i, dtype=torch.int32)

    slab = arenapy.Slab((1 << 20) + 256, 4, arenapy.Shared())
    wrong = 0
    collate = arenapy_torch.collate(slab)
    for epoch in range(2):
        loader = DataLoader(Samples(), batch_size=4, num_workers=1, collate_fn=collate)
        for number, batch in enumerate(loader):
            assert batch.is_pinned()
            torch.cuda._sleep(8_000_000)
            x = batch.to("cuda", non_blocking=True)
            del batch
            wrong += (x[:, -1] != 4 * number + torch.arange(4, device="cuda")).sum()
    print(int(wrong))
"""


def test_batches_of_a_loader():
    """They are pinned. One that is dropped is there until the copy out of it is done."""
    assert int(output_of(textwrap.dedent(LOADER.replace("{before}", "")))) == 0


def test_without_the_wait_a_batch_is_overwritten():
    """So the test above can fail."""
    text = (
        "torch_batches.Collate._dropped = "
        "lambda self, item, word, first: self._items.give_back(item, word)"
    )
    assert int(output_of(textwrap.dedent(LOADER.replace("{before}", text)))) > 0


def test_the_program_ends_while_a_batch_is_copied():
    output_of(
        textwrap.dedent("""
            import arenapy, torch
            from arenapy.interop import torch as arenapy_torch

            collate = arenapy_torch.collate(arenapy.Slab(1 << 20, 8, arenapy.Shared()))
            batch = collate([torch.ones(1000), torch.zeros(1000)])
            torch.cuda._sleep(50_000_000)
            copy = batch.to("cuda", non_blocking=True)
            del batch
        """)
    )
