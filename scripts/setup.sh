# Puts a Python environment with AgentRL first on PATH. Source it from any folder:
#
#     source scripts/setup.sh run      the requirements of a run
#     source scripts/setup.sh dev      these and the requirements of the tests
#     source scripts/setup.sh sglang   SGLang, in `.venv-sglang`; PATH is left as it is
#
# An active environment (venv or conda) is used if AgentRL is installed in it. Otherwise `.venv` is
# made once in the repository and filled from the requirement files, with uv if installed, else pip.
# A stamp with the files' hash, written last, lets later calls skip this. An interrupted set-up is
# repeated from the start.

agentrl_setup() {
    local root want="${1:-run}" env tool
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    if [ "$want" = sglang ]; then
        agentrl_fill_venv "$root" "$root/.venv-sglang" sglang
        return
    fi
    env="${VIRTUAL_ENV:-${CONDA_PREFIX:-}}"
    if [ -n "$env" ] && [ "$env" != "$root/.venv" ] && [ -x "$env/bin/agentrl" ]; then
        for tool in pytest ruff mypy; do
            if [ "$want" = dev ] && [ ! -x "$env/bin/$tool" ]; then
                echo "setup: the active environment $env has no $tool: run" \
                    "\`pip install -r requirements-dev.txt\` in it, or deactivate it" >&2
                return 1
            fi
        done
    else
        env="$root/.venv"
        agentrl_fill_venv "$root" "$env" "$want" || return 1
    fi
    PATH="$env/bin:$PATH"
    export PATH
}

# agentrl_fill_venv ROOT ENV run|dev|sglang: installs the requirement files of ROOT into ENV.
agentrl_fill_venv() {
    local root="$1" env="$2" want="$3" files=(requirements.txt) program=agentrl stamp hash
    local began=$SECONDS
    [ "$want" = dev ] && files+=(requirements-dev.txt)
    [ "$want" = sglang ] && files=(requirements-sglang.txt) program=python
    hash="$(agentrl_hash "$root" "$want" "${files[@]}")" || return 1
    stamp="$env/agentrl-setup-$want"
    if [ -f "$stamp" ] && [ "$(<"$stamp")" = "$hash" ] && [ -x "$env/bin/$program" ]; then
        return 0
    fi

    mkdir -p "$root/.cache" || return 1
    # One set-up at a time. The lock is released when its process ends.
    exec {agentrl_lock}>"$root/.cache/setup.lock"
    if ! flock -n "$agentrl_lock"; then
        echo "setup: waiting for another set-up of $env" >&2
        flock "$agentrl_lock"
    fi
    if [ ! -f "$stamp" ] || [ "$(<"$stamp")" != "$hash" ]; then
        if [ ! -x "$env/bin/python" ] || [ -f "$env/agentrl-setup-begun" ]; then
            agentrl_make_venv "$env" || return 1
        fi
        touch "$env/agentrl-setup-begun"
        rm -f "$env"/agentrl-setup-run "$env"/agentrl-setup-dev "$env"/agentrl-setup-sglang
        if [ "$want" = dev ]; then
            echo "setup: the tests need more than a run: installing requirements.txt and" \
                "requirements-dev.txt into ${env#"$PWD/"} (once, some minutes)" >&2
        else
            echo "setup: installing ${files[*]} into ${env#"$PWD/"} (once, some minutes)" >&2
        fi
        local requirements=() file
        for file in "${files[@]}"; do requirements+=(-r "$root/$file"); done
        agentrl_install "$root" "$env" "$want" "${requirements[@]}" || {
            # Installers roll back unfinished packages, so the environment is consistent.
            rm -f "$env/agentrl-setup-begun"
            return 1
        }
        rm -f "$env/agentrl-setup-begun"
        echo "$hash" >"$stamp"
        local activate="$env/bin/activate"
        if [ "$want" = sglang ]; then
            echo "setup: done in $((SECONDS - began)) s" >&2
        else
            # A set-up for the tests includes the requirements of a run.
            agentrl_hash "$root" run requirements.txt >"$env/agentrl-setup-run"
            echo "setup: done in $((SECONDS - began)) s; \`agentrl\` and \`python\` are in your shell" \
                "after:  source $(printf %q "${activate#"$PWD/"}")" >&2
        fi
    fi
    exec {agentrl_lock}>&-
    unset agentrl_lock
}

# agentrl_hash ROOT run|dev|sglang FILE...: the hash of what an environment is made from.
agentrl_hash() {
    local root="$1" want="$2"
    shift 2
    [ "$want" = sglang ] || set -- "$@" pyproject.toml # AgentRL is not installed beside SGLang
    (cd "$root" && cat "$@" | sha256sum | cut -c1-64)
}

# agentrl_install ROOT ENV run|dev|sglang REQUIREMENT...: installs the requirements, and AgentRL as
# editable unless it is SGLang's environment.
agentrl_install() {
    local root="$1" env="$2" want="$3" log="$1/.cache/setup.log"
    local run=("$env/bin/python" -I "$root/scripts/installing.py" "$log")
    local itself=(--no-deps --no-build-isolation -e "$root")
    shift 3
    : >"$log"
    local pip=("$env/bin/python" -m pip install --disable-pip-version-check)
    if agentrl_use_uv "$env"; then
        local uv=(uv pip install --python "$env/bin/python")
        if "${run[@]}" "${uv[@]}" "$@" &&
            { [ "$want" = sglang ] || "${run[@]}" "${uv[@]}" "${itself[@]}"; }; then
            return 0
        elif [ $? = 130 ]; then
            return 130
        fi
    fi
    "${run[@]}" "${pip[@]}" "$@" &&
        { [ "$want" = sglang ] || "${run[@]}" "${pip[@]}" "${itself[@]}"; }
}

# agentrl_use_uv ENV: whether uv is installed and uses the same package index as pip. uv does not read
# pip's configuration, so pip is used if only pip has another index.
agentrl_use_uv() {
    command -v uv >/dev/null || return 1
    [ -n "${UV_DEFAULT_INDEX:-}${UV_INDEX:-}${UV_INDEX_URL:-}${UV_FIND_LINKS:-}" ] && return 0
    local settings # not a pipe to grep, which would fail if grep stops reading early
    settings="$("$1/bin/python" -m pip config list 2>/dev/null)" || true
    ! [[ $settings =~ index-url|find-links|no-index ]]
}

# agentrl_make_venv ENV: makes an empty environment with the first Python that is new enough.
agentrl_make_venv() {
    local python
    for python in python3 python3.13 python3.12 python3.11; do
        if "$python" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' \
            2>/dev/null; then
            echo "setup: making ${1#"$PWD/"} with $("$python" --version)" >&2
            "$python" -m venv --clear "$1"
            return
        fi
    done
    if command -v uv >/dev/null; then
        echo "setup: making ${1#"$PWD/"} with uv, on a Python that it finds or fetches" >&2
        uv venv --quiet --seed --clear --python ">=3.11" "$1"
        return
    fi
    echo "setup: no Python 3.11 or newer with venv and pip found (python3 is" \
        "$(python3 --version 2>&1 | tail -n 1)): install one, on Debian and Ubuntu with" \
        "\`apt install python3 python3-venv\`, or activate an environment that has AgentRL" >&2
    return 1
}

agentrl_setup "${1:-run}"
