#!/bin/sh
# Boots a systemd of its own as PID 1 of fresh namespaces: boot-systemd.sh CGROUP UNITS TARGET. The network stays shared,
# and so do all files but /run, /dev, /etc and /var, whose changes vanish with it.
set -eu

if [ "${1}" != --inner ]; then
    echo $$ > "$1/cgroup.procs"
    exec unshare --fork --pid --mount-proc --kill-child=SIGKILL --mount --cgroup --ipc --uts "$0" --inner "$2" "$3"
fi
units=$2 target=$3

mount --make-rprivate /
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tmpfs -o mode=0755 tmpfs /run
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys

dev=/run/.dev
mkdir -p $dev
mount -t tmpfs -o mode=0755 tmpfs $dev
for node in null zero full random urandom tty; do
    touch $dev/$node
    mount --bind /dev/$node $dev/$node
done
mkdir $dev/shm $dev/pts
mount -t tmpfs -o mode=1777 tmpfs $dev/shm
mount -t devpts -o newinstance,ptmxmode=0666 devpts $dev/pts
ln -s pts/ptmx $dev/ptmx
ln -s /proc/self/fd $dev/fd
for stream in in:0 out:1 err:2; do ln -s "/proc/self/fd/${stream#*:}" "$dev/std${stream%:*}"; done
mount --rbind $dev /dev

for tree in etc var; do
    mkdir -p /run/.overlay/$tree/upper /run/.overlay/$tree/work
    mount -t overlay -o "lowerdir=/$tree,upperdir=/run/.overlay/$tree/upper,workdir=/run/.overlay/$tree/work" overlay /$tree
done

exec env -i container=refitd-test PATH="$PATH" \
    SYSTEMD_UNIT_PATH="$units" SYSTEMD_GENERATOR_PATH=/nonexistent SYSTEMD_ENVIRONMENT_GENERATOR_PATH=/nonexistent \
    /lib/systemd/systemd --system --unit="$target" --log-target=journal --show-status=no
