# Functions that the steps share. No step is named here.

RESULTS=$WORK/results     # a line for each step that has ended

# Runs one step in a subshell that stops at its first error, and notes how it went. A step that
# cannot apply to this machine ends with `not_here REASON`, which is shown in the summary.
run_step() {
    local name=$1 begun=$SECONDS code=0 how=passed why=""
    printf '\n===== %s =====\n' "$name"
    set +e
    (
        trap 'processor_seconds $BASHPID >"$WORK/busy.$name"' EXIT
        set -euo pipefail
        STEP=$name
        "step_$name"
    ) </dev/null
    code=$?
    set -e
    if [[ $code -ne 0 ]]; then
        how=FAILED why="exit status $code"
    elif [[ -e $WORK/not-here.$name ]]; then
        how=skipped why=$(<"$WORK/not-here.$name")
    fi
    printf '%-7s %-16s %4d s %5d s of processors  %s\n' "$how" "$name" $((SECONDS - begun)) \
        "$(<"$WORK/busy.$name")" "$why" | tee -a "$RESULTS"
}

# What a process and its ended children have used so far: processor_seconds PID
processor_seconds() {
    awk -v ticks="$(getconf CLK_TCK)" \
        '{ sub(/.*\) /, ""); printf "%d", ($12 + $13 + $14 + $15) / ticks }' "/proc/$1/stat"
}

run_steps() {
    local name
    for name in "$@"; do
        run_step "$name"
    done
}

# Runs the steps of two lists, two at a time: much of each keeps one core busy. Those of the second
# list need nothing but the first step of the first one. Each of two workers has a list, and helps
# with the other one when its own is done. What the second worker prints comes when both have ended.
run_both() {
    mkdir "$WORK/taken"
    {
        work_off $2
        until grep -q " ${1%% *} " "$RESULTS"; do sleep 1; done
        work_off $1
    } >"$WORK/second.log" 2>&1 &
    work_off $1 $2
    wait $!
    cat "$WORK/second.log"
}

# Runs those of some steps that nobody else has taken.
work_off() {
    local name
    for name in "$@"; do
        ! mkdir "$WORK/taken/$name" 2>/dev/null || run_step "$name"
    done
}

not_here() {
    printf '%s' "$1" >"$WORK/not-here.$STEP"
    exit 0
}

summary() {
    printf '\n===== summary =====\n'
    cat "$RESULTS"
    echo "total $SECONDS s"
    printf 'steps: %d passed, %d failed, %d skipped\n' \
        "$(grep -c ^passed "$RESULTS")" "$(grep -c ^FAILED "$RESULTS")" "$(grep -c ^skipped "$RESULTS")"
    ! grep -q ^FAILED "$RESULTS"
}

# Makes sure that the machine has a command: need COMMAND PACKAGE...
need() {
    local command=$1
    shift
    command -v "$command" >/dev/null && return
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y "$@"
}

# Makes sure that Debian packages without a command are there.
packages() {
    dpkg -s "$@" >/dev/null 2>&1 && return
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@"
}

# The package is built several times: what was translated by Cython once, or compiled alike, is not
# again.
cache_compiler() {
    export CC='ccache gcc' CCACHE_DIR=$WORK/ccache CCACHE_NOHASHDIR=1 ARENAPY_TRANSLATED=$WORK/translated
}

# Copies what git would commit (and has not been told to ignore) into a new directory.
copy_tree() {
    mkdir -p "$1"
    (cd "$ROOT" && git ls-files -z --cached --others --exclude-standard) |
        (cd "$ROOT" && tar --create --null --files-from=- --ignore-failed-read) |
        tar --extract --directory="$1"
}

# A virtual environment with the package installed for its tests: test_environment DIR PYTHON
test_environment() {
    copy_tree "$1"
    "$2" -m venv "$1/.venv"
    (cd "$1" && .venv/bin/pip install --quiet --editable '.[test]')
}

# Every CPython >= 3.11 but the one that runs CI, one of each minor version, GIL builds or not:
# other_pythons gil|nogil
other_pythons() {
    local python version seen
    seen=" $(python_version python3) "
    for python in $(compgen -c python3. | grep -E '^python3\.1[1-9]t?$' | sort -u) \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python /opt/python*/bin/python3; do
        version=$(python_version "$python") || continue
        [[ $version == *"-$1" && $seen != *" $version "* ]] || continue
        seen+="$version "
        echo "$python"
    done
}

# Prints as 3.13-gil or 3.13-nogil; fails for what is not a CPython >= 3.11.
python_version() {
    "$1" -c '
import sys, sysconfig
assert sys.implementation.name == "cpython" and sys.version_info >= (3, 11)
kind = "nogil" if sysconfig.get_config_var("Py_GIL_DISABLED") else "gil"
print("%d.%d-%s" % (*sys.version_info[:2], kind))' 2>/dev/null
}

# The path of clang's AddressSanitizer.
asan_runtime() {
    clang -print-file-name="libclang_rt.asan-$(uname -m).so"
}

# Installs what extras of the package ask for, without building the package again. One at a time: the
# steps of both workers use the environment of the README.
# install_extra PYTHON EXTRA...
install_extra() {
    "$1" - "${@:2}" <<'PYTHON' | flock "$WORK" "$1" -m pip install --quiet --requirement /dev/stdin
import sys, tomllib
with open("pyproject.toml", "rb") as file:
    extras = tomllib.load(file)["project"]["optional-dependencies"]
print(*(wanted for extra in sys.argv[1:] for wanted in extras[extra]), sep="\n")
PYTHON
}

# The arguments that leave out what .ci/redundant.txt lists; none in the tier long.
without_redundant() {
    [[ $TIER == long ]] || echo "@$ROOT/.ci/redundant.txt"
}
