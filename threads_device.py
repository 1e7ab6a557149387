import sys, statistics
sys.path.insert(0, ".")
from asv_benches.host import bench_threads as b
from asv_benches.support.process import installed
from asv_benches.support.workers import OURS
rounds = int(sys.argv[1])
print("cpus", len(b.CPUS), "mallocs", installed(), flush=True)
for work in b.WORK:
    for name in (*b.HEAPS, *installed()):
        if name == "slab" and b.OWN.get(work, 64) > 4096: continue
        m = OURS if name in b.HEAPS else name
        r = b.rates_in_c(m, b.HEAPS.get(name, "heap"), work, rounds)
        one = r[1]
        print(f"{work:26} {name:9} " + "  ".join(f"{n}: {v/1e6:7.1f} ({v/one:4.2f}x)" for n, v in r.items()), flush=True)
