#!/bin/bash
# A real SLURM of two nodes on this one machine, for tests and for trying things by hand.
#   tests/cluster/cluster.sh start DIR    start it with its state in DIR; prints the SLURM_CONF to export
#   tests/cluster/cluster.sh stop DIR     end it
# Needs root and the packages slurmctld, slurmd, slurm-client and munge (Debian: apt-get install).
# The nodes n1 and n2 are two slurmd processes on two ports of the loopback interface.
set -euo pipefail
action=${1:?start or stop} dir=$(realpath -m "${2:?a folder for its state}")

daemon() { # NAME COMMAND...: run in the background, note the process id
  local name=$1
  shift
  setsid "$@" >"$dir/$name.out" 2>&1 </dev/null &
  echo $! >"$dir/$name.pid"
}

stop() {
  for pid in "$dir"/*.pid; do
    [ -e "$pid" ] || continue
    kill -TERM "$(cat "$pid")" 2>/dev/null || true
  done
  sleep 1
  for pid in "$dir"/*.pid; do
    [ -e "$pid" ] || continue
    kill -KILL "$(cat "$pid")" 2>/dev/null || true
    rm -f "$pid"
  done
}

start() {
  mkdir -p "$dir"/{state,spool-n1,spool-n2,munge}
  # munge: a key and a socket of its own, so that no other cluster's are touched
  chmod 755 "$dir" && chmod 700 "$dir/munge"
  dd if=/dev/urandom of="$dir/munge/key" bs=128 count=1 status=none
  chmod 600 "$dir/munge/key"
  daemon munged munged --foreground --force --key-file="$dir/munge/key" --socket="$dir/munge.socket" \
    --pid-file="$dir/munge/pid" --log-file="$dir/munge/log" --seed-file="$dir/munge/seed"
  local cores memory port=${SLURM_TEST_PORT:-26800}
  cores=$(nproc) memory=1000
  cat >"$dir/slurm.conf" <<END
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/slurmctld.own
SlurmdPidFile=$dir/slurmd-%n.own
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=1
SlurmdTimeout=30
KillWait=10
MinJobAge=86400
InactiveLimit=0
SchedulerParameters=sched_interval=1,batch_sched_delay=1,bf_interval=1
JobRequeue=1
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=$cores RealMemory=$memory
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=$cores RealMemory=$memory
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
END
  export SLURM_CONF=$dir/slurm.conf
  for _ in $(seq 100); do [ -S "$dir/munge.socket" ] && break || sleep 0.1; done
  daemon slurmctld slurmctld -D -i
  daemon n1 slurmd -D -N n1
  daemon n2 slurmd -D -N n2
  for _ in $(seq 300); do
    [ "$(sinfo --noheader --Node --states=idle --format=%N 2>/dev/null | sort -u | wc -l)" = 2 ] && break || sleep 0.2
  done
  sinfo --noheader --Node --states=idle --format=%N | grep -q . || { tail -n 20 "$dir"/*.log "$dir"/*.out; exit 1; }
  echo "export SLURM_CONF=$SLURM_CONF"
}

case $action in start) start ;; stop) stop ;; *) echo "start or stop" >&2; exit 2 ;; esac
