#!/usr/bin/env bash
# A Slurm cluster on this one machine, for the tests of slurm/*.sbatch. Needs root on Debian or Ubuntu.
#
#   testbed.sh up DIR [NODES] [CPUS] [PID]   install Slurm's packages if they are missing, start the cluster, write
#                                            DIR/env.sh; the cluster goes down when process PID, if given, has ended
#   testbed.sh down DIR                      end it, with every job that is left on it; logs stay in DIR/log
#
# A node is a slurmd in network, host name, mount and process namespaces of its own, joined to the others by a bridge:
# it has its own address and its own localhost, and ends with all its processes when the first of them is killed. Only
# the file system is shared. CPUs are pretended. The partition "urgent" preempts the default one, "batch", by requeueing,
# after a grace time in which a job has the signal that it asked for (sbatch --signal).

set -Eeuo pipefail
umask 022
export LC_ALL=C PATH=$PATH:/usr/sbin:/sbin
trap 'echo "testbed.sh: line $LINENO failed: $BASH_COMMAND" >&2' ERR

PACKAGES=(munge slurmctld slurmd slurm-client libpmix-dev iproute2 procps)  # libpmix-dev: Slurm's plugin opens libpmix.so
BRIDGE=nsabed0
SUBNET=10.213.9
PORT=16917

die() { echo "testbed.sh: $*" >&2; exit 1; }

retry() { # SECONDS COMMAND...: until it succeeds
    local end=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < end)) || return 1
        sleep 0.2
    done
}

install_packages() {
    local package missing=()
    for package in "${PACKAGES[@]}"; do
        [[ $(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
    done
    ((${#missing[@]})) || return 0
    echo "testbed.sh: installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    local get=(apt-get install -y -q --no-install-recommends "${missing[@]}")
    "${get[@]}" >"$DIR/log/apt.log" 2>&1 || { apt-get update -q && "${get[@]}"; } >>"$DIR/log/apt.log" 2>&1 ||
        die "apt-get failed: $(tail -n 3 "$DIR/log/apt.log")"
}

write_config() {
    local i memory
    memory=$(awk '/^MemTotal:/ {print int($2 / 1024)}' /proc/meminfo)
    echo "CgroupPlugin=cgroup/v1" >"$DIR/etc/cgroup.conf"
    echo "options timeout:1 attempts:1" >"$DIR/etc/resolv.conf" # no name server out there: look-ups fail at once
    {
        echo "127.0.0.1 localhost"
        echo "$SUBNET.254 $(hostname -s)"
        for ((i = 1; i <= NODES; i++)); do echo "$SUBNET.$i n$i"; done
    } >"$DIR/etc/hosts"
    cat >"$DIR/etc/slurm.conf" <<CONF
ClusterName=testbed
SlurmctldHost=$(hostname -s)($SUBNET.254)
SlurmctldPort=$PORT
SlurmdPort=$((PORT + 1))
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job starts cred_expire + 1 seconds later.
AuthInfo=socket=$DIR/munge.sock,cred_expire=10
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/%n/spool
# Of each node: PMIx servers of two nodes must not meet in one directory.
TmpFS=$DIR/%n/tmp
SlurmctldPidFile=$DIR/pid/slurmctld
SlurmdPidFile=$DIR/%n/slurmd.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd.%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=10
MinJobAge=86400
# The backfill scheduler alone starts heterogeneous jobs; every 30 s by default.
SchedulerParameters=bf_interval=1,sched_interval=2,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
NodeName=n[1-$NODES] NodeAddr=$SUBNET.[1-$NODES] CPUs=$CPUS RealMemory=$memory
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=9
CONF
    cat >"$DIR/env.sh" <<ENV
export SLURM_CONF=$DIR/etc/slurm.conf
ENV
}

# The first process of a node, inside its namespaces. It lives as long as the node, and reaps what jobs leave behind.
node() {
    retry 10 ip link show eth0 || die "$1: no network"
    hostname "$1"
    ip link set lo up
    ip addr add "$SUBNET.${1#n}/24" dev eth0
    ip link set eth0 up
    mount --bind "$DIR/etc/hosts" /etc/hosts
    mount --bind "$DIR/etc/resolv.conf" /etc/resolv.conf || true
    slurmd -D -f "$DIR/etc/slurm.conf" -N "$1" &
    wait
}

start_node() {
    mkdir -p "$DIR/$1/spool" "$DIR/$1/tmp"
    setsid unshare --net --uts --mount --pid --fork --kill-child --mount-proc bash "$0" node "$DIR" "$1" \
        </dev/null >"$DIR/log/$1.out" 2>&1 &
    local outside=$!
    echo "$outside" >"$DIR/pid/$1"
    retry 10 pgrep -P "$outside" || die "$1: namespaces are refused here: $(cat "$DIR/log/$1.out")"
    ip link add "nsabed-$1" type veth peer name eth0 netns "$(pgrep -P "$outside")"
    ip link set "nsabed-$1" master "$BRIDGE" up
}

all_idle() { [[ $(sinfo -h -N -p batch -t idle -o %N | wc -l) == "$NODES" ]]; }

up() {
    local i
    down
    mkdir -p "$DIR/log"
    install_packages
    mkdir -p "$DIR"/{etc,pid,state}
    chmod 755 "$DIR" # mktemp's 700 would not do: munged wants everybody to reach its socket
    NODES=${1:-3} CPUS=${2:-4}
    write_config
    # shellcheck source=/dev/null
    . "$DIR/env.sh"
    mungekey --create --keyfile="$DIR/etc/munge.key"
    munged --key-file="$DIR/etc/munge.key" --socket="$DIR/munge.sock" --seed-file="$DIR/etc/munge.seed" \
        --pid-file="$DIR/pid/munged" --log-file="$DIR/log/munged.log" </dev/null >"$DIR/log/munged.out" 2>&1 ||
        die "munged does not start: $(cat "$DIR/log/munged.out")"
    [[ ! -e /sys/class/net/$BRIDGE ]] || die "another testbed runs: $0 down $(bridge_owner)"
    ip link add "$BRIDGE" type bridge || die "network bridges are refused here"
    ip link set "$BRIDGE" alias "$DIR"
    ip addr add "$SUBNET.254/24" dev "$BRIDGE"
    ip link set "$BRIDGE" up
    slurmctld -i -f "$SLURM_CONF" </dev/null >"$DIR/log/slurmctld.out" 2>&1 ||
        die "slurmctld does not start: $(cat "$DIR/log/slurmctld.out")"
    for ((i = 1; i <= NODES; i++)); do start_node "n$i"; done
    retry 60 all_idle || { sinfo -N -l; die "not all nodes came up, see $DIR/log"; }
    if [[ -n ${3:-} ]]; then
        # For a test run that is killed and does not come to `down`.
        setsid bash "$0" down_after "$DIR" "$3" </dev/null >>"$DIR/log/down_after.out" 2>&1 &
        echo $! >"$DIR/pid/down_after"
    fi
    echo "testbed.sh: $(sinfo --version), $NODES nodes; now: . $DIR/env.sh"
}

# The directory of the testbed that is up.
bridge_owner() {
    if [[ -e /sys/class/net/$BRIDGE ]]; then cat "/sys/class/net/$BRIDGE/ifalias"; fi
}

down_after() {
    while [[ -e /proc/$1 ]]; do sleep 1; done
    rm -f "$DIR/pid/down_after"
    down
}

down() {
    local file pid
    for file in "$DIR"/pid/*; do
        [[ -s $file ]] || continue
        pid=$(<"$file")
        # A number from long ago may be another process by now; ours have the directory in their command line.
        if tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" | grep -qF -- "$DIR"; then kill -KILL "$pid"; fi
        rm "$file"
    done
    if [[ $(bridge_owner) == "$DIR" ]]; then ip link del "$BRIDGE"; fi
    for file in "$DIR"/*; do
        [[ $file == "$DIR/log" ]] || rm -rf "$file"
    done
}

[[ $# -ge 2 && $1 =~ ^(up|down|down_after|node)$ ]] || { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[[ $(id -u) == 0 ]] || die "must run as root"
DIR=$(readlink -m "$2")
((${#DIR} <= 60)) || die "$DIR is too long for the UNIX sockets in it"
"$1" "${@:3}"
