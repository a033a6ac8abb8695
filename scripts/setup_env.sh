#!/usr/bin/env bash
# Makes the virtual environment .venv of this repository with the packages pinned in constraints.txt.
#
#   bash scripts/setup_env.sh [run|test]     run: what training needs; test: what the tests need besides
#
# Does nothing, in a tenth of a second, when .venv is up to date. Repairs what an interrupted set-up left.
# PYTHON=/path/to/python chooses the interpreter; otherwise the first Python 3.11, 3.12 or 3.10 found is taken.

set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="$root/.venv"
# Holds "installing", or "ready LEVEL FINGERPRINT". Written before anything else, so that an interrupted set-up is known.
state_file="$venv/.setup-state"
place_file="$venv/.setup-place" # where the repository lay then: the programs in an environment know their own path
log="$venv/setup.log"

say() { printf 'set-up: %s\n' "$*"; }

fail() {
    printf 'set-up failed: %s\n' "$1" >&2
    shift
    if [ $# -gt 0 ]; then printf '  %s\n' "$@" >&2; fi
    exit 1
}

# ---- which Python ----------------------------------------------------------------------------------------------------

# Every place where a Python may be, best first. Many will not exist.
candidates() {
    local name place version
    for name in python3.11 python3.12 python3.10 python3 python; do
        type -aP "$name" || true
    done
    local places=("${PYENV_ROOT:-$HOME/.pyenv}" "$HOME/.pyenv")
    # With pyenv's shims on PATH, the versions lie beside them, whatever HOME is.
    while IFS= read -r place; do
        places+=("${place%/shims/*}")
    done < <(type -aP python3 python python3.11 | grep '/shims/' || true)
    for version in 3.11 3.12 3.10; do
        for place in "${places[@]}"; do
            printf '%s\n' "$place/versions/$version".*/bin/python
        done
        for place in "${UV_PYTHON_INSTALL_DIR:-}" "${XDG_DATA_HOME:-$HOME/.local/share}/uv/python"; do
            if [ -n "$place" ]; then printf '%s\n' "$place/cpython-$version".*/bin/python3; fi
        done
        for place in /usr/bin /usr/local/bin /opt/homebrew/bin "/opt/python/cp${version/./}-cp${version/./}/bin"; do
            printf '%s\n' "$place/python$version"
        done
    done
    for place in "${CONDA_PREFIX:-}" "$HOME/miniconda3" "$HOME/miniforge3" "$HOME/anaconda3" /opt/conda; do
        if [ -n "$place" ]; then printf '%s\n' "$place/bin/python" "$place"/envs/*/bin/python; fi
    done
}

# Prints a verdict on an interpreter: "ok 3.11.7 /real/path", "old 3.8.18", "novenv 3.12.3", or "broken". It has to be run
# to know: a shim may exist for a version that is not installed.
probe() {
    "$1" -c '
import sys
version = "%d.%d.%d" % sys.version_info[:3]
if not (3, 10) <= sys.version_info[:2] <= (3, 12):
    print("other " + version)
else:
    try:
        import ensurepip, venv
    except ImportError:
        print("novenv " + version)
    else:
        print("ok " + version + " " + sys.executable)
' 2>/dev/null </dev/null || printf 'broken\n'
}

# What a verdict means, for the message when none will do.
explain() {
    local verdict="$1" version="${1#* }"
    case "$verdict" in
        other*) printf 'Python %s, neither 3.10, 3.11 nor 3.12' "$version" ;;
        novenv*) printf 'Python %s without the venv and ensurepip modules (on Debian or Ubuntu: apt install python%s-venv)' \
            "$version" "${version%.*}" ;;
        *) printf 'does not run' ;;
    esac
}

# Sets `python` to the interpreter to use.
find_python() {
    local candidate verdict seen=$'\n' looked_at=()
    if [ -n "${PYTHON:-}" ]; then
        verdict="$(probe "$PYTHON")"
        case "$verdict" in
            ok*) python="${verdict#ok * }" && return ;;
            *) fail "PYTHON=$PYTHON: $(explain "$verdict")" "Point PYTHON to a Python 3.10, 3.11 or 3.12, or leave it unset." ;;
        esac
    fi
    while IFS= read -r candidate; do
        # The environment that is about to be made anew is no place to take its Python from.
        case "$candidate" in "$venv"/*) continue ;; esac
        case "$seen" in *$'\n'"$candidate"$'\n'*) continue ;; esac
        seen+="$candidate"$'\n'
        [ -x "$candidate" ] || continue
        verdict="$(probe "$candidate")"
        case "$verdict" in
            "ok "*) python="${verdict#ok * }" && return ;;
            *) looked_at+=("$candidate: $(explain "$verdict")") ;;
        esac
    done < <(candidates 2>/dev/null)
    fail "no Python 3.10, 3.11 or 3.12 that can make a virtual environment was found" \
        ${looked_at[@]+"${looked_at[@]}"} \
        "Install one, for example with 'pyenv install 3.11', 'uv python install 3.11' or your system's package manager," \
        "or point to one: PYTHON=/path/to/python3.11 bash scripts/quickstart.sh"
}

# ---- the environment -------------------------------------------------------------------------------------------------

# Changes when another set-up is needed.
fingerprint() {
    { printf '%s\n' "$root"; cat "$root/constraints.txt" "$root/setup.cfg" "$root/pyproject.toml"; } | cksum | tr ' ' '-'
}

# Prints "3.11" when .venv has a Python that runs and has pip.
venv_version() {
    "$venv/bin/python" -c 'import importlib.util, sys
if importlib.util.find_spec("pip"): print("%d.%d" % sys.version_info[:2])' 2>/dev/null </dev/null || true
}

write_state() {
    printf '%s\n' "$1" >"$state_file.tmp"
    mv "$state_file.tmp" "$state_file"
}

# Leaves a .venv whose Python runs, made anew where there is none to build on. $1: what the state file said.
prepare_venv() {
    local state="$1" version python=""
    if [ -e "$venv" ]; then
        version="$(venv_version)"
        if [ "$state" = installing ]; then
            say "an earlier set-up was interrupted: making .venv anew"
        elif [ -f "$place_file" ] && [ "$(cat "$place_file")" != "$root" ]; then
            say "the repository was moved: making .venv anew"
        elif [ "$version" = 3.10 ] || [ "$version" = 3.11 ] || [ "$version" = 3.12 ]; then
            say "updating .venv (Python $version)"
            return
        elif [ -n "$version" ]; then
            fail "$venv is an environment of Python $version, which this script did not make" "Move it away or delete it."
        elif [ ! -f "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
            fail "$venv exists and is not a virtual environment" "Move it away or delete it."
        else
            say ".venv does not work: making it anew"
        fi
    fi
    find_python
    rm -rf "$venv"
    mkdir "$venv"
    write_state installing
    say "making .venv with $python"
    "$python" -m venv "$venv" >"$log" 2>&1 || fail_with_log "$python -m venv failed"
}

fail_with_log() {
    local lines=()
    while IFS= read -r line; do lines+=("${line:0:200}"); done < <(tail -n 15 "$log")
    fail "$1; the end of $log says:" ${lines[@]+"${lines[@]}"}
}

# Follows pip's output on standard input: on a terminal one line that changes, elsewhere a line for what takes long.
show_progress() {
    local line doing="asking for packages" count=0 said_at=$SECONDS started_at=$SECONDS status
    while true; do
        status=0
        IFS= read -r -t 5 line || status=$?
        if [ "$status" -eq 0 ]; then
            case "$line" in
                "Collecting "*) count=$((count + 1)) && doing="${line#Collecting }" && doing="${doing%% (from *}" ;;
                *"Downloading "*" MB)") doing="${line#*Downloading }" ;;
                *"Downloading "*" GB)") doing="${line#*Downloading }" ;;
                "Installing collected packages"*mindspore*) doing="unpacking, 2.6 GiB for MindSpore: about a minute" ;;
                "Installing collected packages"*) doing="unpacking" ;;
                *) continue ;;
            esac
        elif [ "$status" -le 128 ]; then
            break # the end of the output
        fi
        if [ -t 1 ]; then
            printf '\r\033[K  [%d packages, %d s] %s' "$count" $((SECONDS - started_at)) "${doing:0:60}"
        elif [ $((SECONDS - said_at)) -ge 20 ] || [[ "$line" == Installing* && "$status" -eq 0 ]]; then
            printf '  [%d packages, %d s] %s\n' "$count" $((SECONDS - started_at)) "$doing"
            said_at=$SECONDS
        fi
    done
    if [ -t 1 ]; then printf '\r\033[K'; fi
    cat >/dev/null # where a timeout looks like the end of the output, pip must still be able to write
}

install_packages() {
    local level="$1" what="." started_at=$SECONDS status=0
    if [ "$level" = test ]; then what=".[test]"; fi
    say "installing the packages pinned in constraints.txt (pip's words: .venv/setup.log)"
    write_state installing
    printf '%s\n' "$root" >"$place_file"
    (cd "$root" && "$venv/bin/python" -m pip install --progress-bar off -c constraints.txt -e "$what" 2>&1) |
        tee -a "$log" | show_progress || status=$?
    # Where a signal ended it, it took nothing back: the next set-up makes the environment anew.
    if [ "$status" -eq 130 ]; then
        say "interrupted; the next call begins anew" >&2
        exit 130
    elif [ "$status" -gt 128 ]; then
        fail_with_log "pip was killed (signal $((status - 128))), perhaps because the memory ran out"
    elif [ "$status" -ne 0 ]; then
        # pip takes back what it began: the environment can be built on next time.
        rm -f "$state_file"
        fail_with_log "pip could not install the packages"
    fi
    write_state "ready $level $(fingerprint)"
    say "done in $((SECONDS - started_at)) s"
}

main() {
    local level="${1:-run}" state="" wanted
    case "$level" in run | test) ;; *) fail "unknown argument '$level'" "Usage: bash scripts/setup_env.sh [run|test]" ;; esac
    # Two set-ups at a time wait for each other, where the system has flock.
    if command -v flock >/dev/null; then
        exec 9<"$root"
        flock -n 9 || { say "waiting for another set-up of this repository" && flock 9; }
    fi
    if [ -f "$state_file" ]; then state="$(cat "$state_file")"; fi
    wanted="$(fingerprint)"
    # An environment made for the tests serves training too, and stays one for the tests.
    case "$state" in "ready test "*) level="test" ;; esac
    if [ "$state" = "ready $level $wanted" ] && "$venv/bin/python" -c '' 2>/dev/null; then
        say ".venv is up to date"
        return
    fi
    prepare_venv "$state"
    install_packages "$level"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then main "$@"; fi
