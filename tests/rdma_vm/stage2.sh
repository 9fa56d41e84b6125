# Second stage, in the host's own root: network, RDMA device, the job, power off.
export PATH=/run/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
. /run/rdma_vm/settings            # node nodes ip peer mtu hostdir cwd
port=/dev/rdma_vm
mkdir -p $port /dev/shm /dev/pts /dev/hugepages
for p in /sys/class/virtio-ports/*; do read -r name <$p/name; ln -s /dev/${p##*/} $port/$name; done
finish() { cd /; sync; umount -l /host 2>/dev/null; echo "rc $1" >$port/ctl; sleep 99999; }
fail() { echo "rdma_vm guest: $*" >$port/err; finish 125; }
mount -t tmpfs -o mode=1777 shm /dev/shm; mount -t devpts -o gid=5,mode=620,ptmxmode=666 pts /dev/pts
mount -t hugetlbfs none /dev/hugepages
ln -sf /proc/self/fd /dev/fd; ln -sf fd/0 /dev/stdin; ln -sf fd/1 /dev/stdout; ln -sf fd/2 /dev/stderr
for f in /sys/class/bdi/9p-*/read_ahead_kb; do echo 1024 >$f; done
ulimit -l unlimited; ulimit -n 65536; ulimit -c 0
echo 0 >/proc/sys/net/ipv6/conf/default/accept_dad; echo 0 >/proc/sys/net/ipv6/conf/eth0/accept_dad
hostname rdma-vm$node
ip link set lo up
ip link set eth0 mtu $mtu; ip addr add $ip/24 dev eth0; ip link set eth0 up || fail "no eth0"
if [ -n "$hostdir" ]; then
    mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=mmap host /host || fail "no /host"
    mount --bind /host "$hostdir" || fail "cannot bind $hostdir"
fi
rdma link add rxe0 type rxe netdev eth0 || fail "cannot make rxe0"
gid= sys=/sys/class/infiniband/rxe0/ports/1
for try in $(seq 50); do             # wait for the port, and for the address in the GID table
    for i in 0 1 2 3; do
        read -r g <$sys/gids/$i && case $g in 0000:0000:0000:0000:0000:ffff:*) gid=$i;; esac
    done
    read -r state <$sys/state
    [ -n "$gid" ] && [ "$state" = "4: ACTIVE" ] && break
    sleep .1
done
[ -n "$gid" ] || fail "rxe0 has no GID for $ip"
echo ready >$port/ctl              # the machine outside lets all start together
until [ -e /run/rdma_vm/go ]; do sleep .1; done
mkfifo /run/out /run/err
cat /run/out >$port/out & o=$!
cat /run/err >$port/err & e=$!
(
    . /run/rdma_vm/env
    export RDMA_VM_NODE=$node RDMA_VM_NODES=$nodes RDMA_VM_IP=$ip RDMA_VM_PEER=$peer
    export RDMA_VM_DEV=rxe0 RDMA_VM_GID=$gid
    cd "$cwd" 2>/dev/null || cd /
    . /run/rdma_vm/job
) </dev/null >/run/out 2>/run/err
rc=$?
(sleep 2; kill $o $e) 2>/dev/null & # a process left behind may hold them open
wait $o $e
finish $rc
