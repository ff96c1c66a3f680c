#!/bin/sh
# Turns a fresh Debian tree into the `base` image. mmdebstrap runs this as a hook, with the tree's
# root as $1, while the package index is still there. Everything here must come out the same on
# every run: no times, no random values, no names of the building host.
set -eu
umask 022
root=$1

# An unprivileged user who may become root, as agent sandboxes commonly have it.
chroot "$root" useradd --uid 1000 --user-group --create-home --shell /bin/bash user
printf 'user ALL=(ALL:ALL) NOPASSWD: ALL\n' > "$root/etc/sudoers.d/user"
chmod 0440 "$root/etc/sudoers.d/user"

# The image has no other owner of its Python: let pip install into it.
printf '[global]\nbreak-system-packages = true\nroot-user-action = ignore\n' > "$root/etc/pip.conf"
printf 'LANG=C.UTF-8\n' > "$root/etc/default/locale"
printf 'LANG=C.UTF-8\n' > "$root/etc/environment"
printf 'export LANG=C.UTF-8\n' > "$root/etc/profile.d/locale.sh"

# The building host's values came in with apt, and so did its files' modes; each sandbox gets its
# own values.
rm -f "$root/etc/hostname" "$root/etc/hosts" "$root/etc/resolv.conf"
printf 'localhost\n' > "$root/etc/hostname"
printf '127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n' > "$root/etc/hosts"
printf 'nameserver 1.1.1.1\nnameserver 8.8.8.8\n' > "$root/etc/resolv.conf"
rm -f "$root/etc/machine-id" "$root/var/lib/dbus/machine-id"
: > "$root/etc/machine-id"

# Backups hold earlier states of the files that useradd and debconf changed.
rm -f "$root/etc/passwd-" "$root/etc/group-" "$root/etc/shadow-" "$root/etc/gshadow-" \
    "$root/etc/subuid-" "$root/etc/subgid-" "$root/var/cache/debconf/"*-old

# Each package's version, and the digest of the file it came from, for the lock.
chroot "$root" dpkg-query -W -f '${db:Status-Status} ${binary:Package} ${Version} ${Architecture}\n' \
    > "$root/coppice-installed"
chroot "$root" apt-cache dumpavail > "$root/coppice-available"
