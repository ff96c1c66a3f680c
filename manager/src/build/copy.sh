# Copies files of an uploaded archive to where they are wanted. Run by bash as root, with
#   TAR      the archive, which is removed in the end
#   SRC      which of its files: a relative path, perhaps with wildcards
#   DEST     an absolute path
#   INTO     not empty if DEST is a directory, whether it is there or not
#   OWNER    user:group for all that is copied or made
#   MODE     permissions of files, or empty; DIRMODE those of directories
set -euo pipefail
shopt -s dotglob globstar nullglob
IFS=
stage=$(mktemp -d /var/tmp/.coppice-copy-XXXXXX)
chmod 755 "$stage"
trap 'rm -rf -- "$stage" "$TAR"' EXIT
tar -xf "$TAR" -C "$stage" --no-same-owner

# Makes a directory; what is missing above it is the owner's as well.
make() {
    local at=$1 top=
    while [ ! -e "$at" ]; do
        top=$at
        at=$(dirname -- "$at")
    done
    mkdir -p -- "$1"
    [ -z "$top" ] || chown -R -- "$OWNER" "$top"
}

is_directory() {
    [ -d "$1" ] && [ ! -L "$1" ]
}

cd -- "$stage"
found=()
# Without separators nothing is split, and wildcards still work.
for path in ./$SRC; do
    if [ -e "$path" ] || [ -L "$path" ]; then
        found+=("$path")
    fi
done
if [ ${#found[@]} -eq 0 ]; then
    echo "the uploaded files have no $SRC" >&2
    exit 1
fi
for path in "${found[@]}"; do
    chown -R -h -- "$OWNER" "$path"
    if [ -n "$MODE" ]; then
        find "$path" -type f -exec chmod -- "$MODE" {} +
        find "$path" -depth -type d -exec chmod -- "$DIRMODE" {} +
    fi
done

# Whether what was found becomes DEST itself: a file unless that is a directory, a directory if that
# is not there.
becomes() {
    [ ${#found[@]} -eq 1 ] || return 1
    if is_directory "${found[0]}"; then
        [ ! -e "$DEST" ]
    else
        [ -z "$INTO" ] && [ ! -d "$DEST" ]
    fi
}

if becomes; then
    make "$(dirname -- "$DEST")"
    cp -a -T -- "${found[0]}" "$DEST"
    exit
fi
make "$DEST"
for path in "${found[@]}"; do
    if is_directory "$path"; then
        # Of a directory the content is copied. Directories that are there stay whose they are.
        tar -C "$path" -cf - . |
            tar -C "$DEST" -xpf - --same-owner --no-overwrite-dir --keep-directory-symlink
    else
        cp -a -- "$path" "$DEST/"
    fi
done
