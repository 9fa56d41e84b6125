#!/bin/busybox sh
# First stage, in the initramfs: puts the host's root (9p, read-only) under a tmpfs and switches to it.
b=/bin/busybox
$b mkdir -p /proc /sys /dev /lower /rw /new
$b mount -t proc proc /proc; $b mount -t sysfs sys /sys; $b mount -t devtmpfs dev /dev
die() { echo "rdma_vm init: $*" >/dev/console; echo b >/proc/sysrq-trigger; }
for m in $($b cat /modules.load); do $b modprobe "$m" || echo "rdma_vm: no module $m"; done
p9="trans=virtio,version=9p2000.L,msize=512000"
$b mount -t 9p -o ro,cache=loose,$p9 root /lower || die "no root"
$b mount -t tmpfs -o size=75% rw /rw && $b mkdir /rw/up /rw/work
$b mount -t overlay -o lowerdir=/lower,upperdir=/rw/up,workdir=/rw/work root /new || die "no overlay"
for d in proc sys dev; do $b mount -o move /$d /new/$d || die "move $d"; done
$b mount -t tmpfs run /new/run
$b mkdir -p /new/run/rdma_vm /new/run/lock /new/host
$b mount -t 9p -o ro,$p9 ctl /new/run/rdma_vm || die "no ctl"
$b mkdir -p /new/run/root/lib; $b cp -a /lib/modules /new/run/root/lib/; $b cp /bin/busybox /new/run/
$b mkdir /new/run/bin; $b chroot /new /run/busybox --install -s /run/bin
exec $b switch_root /new /run/busybox sh /run/rdma_vm/stage2
die "switch_root"
