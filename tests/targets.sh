# What a suite of its own runs if no file or folder of tests is named. Source it:
#
#     with_target DEFAULT [pytest arguments]     sets `arguments` to them, with DEFAULT unless one of
#                                                them is a folder or a Python file (and `::NAME`)

with_target() {
    local default="$1" argument
    shift
    arguments=("$@")
    for argument in "$@"; do
        argument="${argument%%::*}"
        if [ -d "$argument" ] || [[ "$argument" == *.py ]]; then return; fi
    done
    arguments+=("$default")
}
