# What a suite needs beside `.venv`, made once. Source it:
#
#     cached NAME HASH INSTALL     sets `folder` to ${XDG_CACHE_HOME:-~/.cache}/agentrl/NAME-HASH,
#                                  which the command INSTALL fills, given the folder, which is empty
#
# HASH is of what the folder is made from (`hash_of`). One set-up at a time; an interrupted one is
# repeated.

# hash_of: a short hash of the standard input
hash_of() { sha256sum | cut -c1-16; }

cached() {
    local name="$1" cache="${XDG_CACHE_HOME:-$HOME/.cache}/agentrl" lock
    folder="$cache/$name-$2"
    mkdir -p "$cache"
    # The lock goes with the process that holds it.
    exec {lock}>"$cache/$name.lock"
    if ! flock -n "$lock"; then
        echo "$name: waiting for another set-up in $cache" >&2
        flock "$lock"
    fi
    if [ ! -f "$folder/complete" ]; then
        echo "$name: installing into $folder (once; some minutes)" >&2
        rm -rf "$folder"
        mkdir "$folder"
        "$3" "$folder"
        touch "$folder/complete"
    fi
    exec {lock}>&-
}
