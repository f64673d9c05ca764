# shellcheck shell=bash disable=SC2034  # the scripts use STARTED and STATUS
# Functions of the batch scripts beside this file. docs/slurm.md says how the scripts are used. Bash 4.4 or newer.
#
# A component is one srun: all ranks of an entry script. The settings that are read here are at the top of the scripts.

MAX_REQUEUES=${MAX_REQUEUES:-100} # limit for a job that keeps stopping early, perhaps without any progress
readonly EXIT_REQUEUE=75 # a component's status: stopped early, with its state on disk
STOPPING=                # USR1 or TERM, once the batch script has received it
TRAINER=                 # process id of the srun to which stop signals are forwarded
STATUS=0                 # what status_of found last
# Of services, by name: "HOST PORT"; the process id of the srun; starting or ready; yes once it was; restarts so far.
declare -A SERVICE_AT=() SERVICE_PROCESS=() SERVICE_STATE=() SERVICE_WAS_READY=() SERVICE_RESTARTS=()

say() { printf '%(%F %T)T %s: %s\n' -1 "$SLURM_JOB_NAME" "$*"; }

die() {
    say "error: $*" >&2
    exit 1
}

# ---- components ---------------------------------------------------------------------------------

# of_group VARIABLE [GROUP]: the value of Slurm's VARIABLE for a component of a heterogeneous job.
of_group() {
    local name=$1${2:+_HET_GROUP_$2}
    printf '%s' "${!name-}"
}

# ranks_per_node [GROUP]: trainer.devices. Slurm writes 8 ranks on each of 4 nodes as "8(x4)".
ranks_per_node() {
    local counts
    counts=$(of_group SLURM_TASKS_PER_NODE "${1-}")
    [[ $counts =~ ^([0-9]+)(\(x[0-9]+\))?$ ]] ||
        die "every node of a component needs the same number of ranks, Slurm gave $counts: use --ntasks-per-node"
    printf '%s' "${BASH_REMATCH[1]}"
}

# prepare: check the variables, create RESULTS_DIR, set the steps' environment and srun's container options.
prepare() {
    check_numbers
    check_mpi
    # With `sbatch --export=...` steps would otherwise get only what that names, and nothing that is exported here.
    export SLURM_EXPORT_ENV=ALL
    REPO=$(cd "$REPO" && pwd)
    mkdir -p "$RESULTS_DIR"
    RESULTS_DIR=$(cd "$RESULTS_DIR" && pwd)
    CONTAINER=()
    if [[ -n $CONTAINER_IMAGE ]]; then
        CONTAINER=(
            --container-image="$CONTAINER_IMAGE"
            --container-mounts="$REPO:$REPO,$RESULTS_DIR:$RESULTS_DIR${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}"
            --container-workdir="$REPO"
            --no-container-mount-home
        )
    fi
    # Or Python's output would come after NCCL's and torch's warnings in the component's log.
    export PYTHONUNBUFFERED=1
}

# check_numbers: die if one of these variables is set to anything but a whole number; they are used hours later.
check_numbers() {
    local name
    for name in MAX_REQUEUES CRITIC_RESTARTS CRITIC_STOP_SECONDS; do
        [[ ${!name-0} =~ ^(0|[1-9][0-9]*)$ ]] || die "$name=${!name}: give a whole number"
    done
}

# check_mpi: die unless this cluster's srun has the plugin that MPI_TYPE names; without it no rank would start.
check_mpi() {
    local available
    [[ -n $MPI_TYPE ]] || return 0
    available=$(srun --mpi=list 2>&1) || true
    grep -qwF -e "$MPI_TYPE" <<<"$available" ||
        die "MPI_TYPE=$MPI_TYPE, but this cluster's srun has no such MPI plugin. Take one that it has, or MPI_TYPE= for" \
            "Slurm's default: only TensorRT-LLM's engines need MPI. srun --mpi=list says: $available"
}

# in_step SRUN_ARGUMENTS... -- COMMAND...: srun, in the container if there is one, with this repository importable.
in_step() {
    local options=()
    while [[ $1 != -- ]]; do
        options+=("$1")
        shift
    done
    exec srun "${options[@]}" "${CONTAINER[@]}" env PYTHONPATH="$REPO${PYTHONPATH:+:$PYTHONPATH}" "${@:2}"
}

# make_secret: create the shared secret in a file that only this user can read; both components find it by its variable.
#
# Not in a step, which would start a container for it. The components check the file's owner and mode.
make_secret() {
    export NEMO_STYLE_ALIGNER_TOKEN_FILE=$RESULTS_DIR/secret
    [[ ! -e $NEMO_STYLE_ALIGNER_TOKEN_FILE ]] || return 0
    local draft=$NEMO_STYLE_ALIGNER_TOKEN_FILE.$SLURM_JOB_ID
    (umask 077 && od -An -v -tx1 -N32 /dev/urandom | tr -d ' \n' >"$draft") ||
        die "the secret $NEMO_STYLE_ALIGNER_TOKEN_FILE could not be made"
    ln "$draft" "$NEMO_STYLE_ALIGNER_TOKEN_FILE" 2>/dev/null || [[ -e $NEMO_STYLE_ALIGNER_TOKEN_FILE ]] ||
        die "the secret $NEMO_STYLE_ALIGNER_TOKEN_FILE could not be made: $RESULTS_DIR has no hard links"
    rm -f "$draft"
}

# check_data_paths: die if there are validation data for a job that takes them along with training data only.
check_data_paths() {
    [[ -n $TRAIN_DATA_PATH || -z $VALID_DATA_PATH ]] ||
        die "VALID_DATA_PATH=$VALID_DATA_PATH is used along with TRAIN_DATA_PATH only, which is not set: set it as well"
}

# data_prefix TRAIN VALIDATION: the config's form of JSONL files.
data_prefix() {
    local quote="\\'" # as a quoted text of the config holds it
    local train=${1//\'/"$quote"} validation=${2//\'/"$quote"}
    printf "{train: ['%s'], validation: ['%s'], test: ['%s']}" "$train" "$validation" "$validation"
}

# start NAME GROUP SCRIPT OVERRIDES...: start a component that is a job of this repository, with what Slurm gave it.
start() {
    local devices
    devices=$(ranks_per_node "$2")
    step "$1" "$2" "$PYTHON" -u "$REPO/examples/nlp/gpt/$3" \
        trainer.num_nodes="$(of_group SLURM_JOB_NUM_NODES "$2")" \
        trainer.devices="$devices" \
        exp_manager.explicit_log_dir="$RESULTS_DIR/$1" \
        "${@:4}"
}

# step NAME GROUP COMMAND...: start a component in the background; its srun's process id is in STARTED.
#
# GROUP is empty in a job of one component. The component writes to RESULTS_DIR/NAME. A rank that exits with an error
# must not have the others killed (--kill-on-bad-exit=0): ranks that stop early all exit with 75, one after the other.
# Ranks still running --wait seconds after the first has ended are hanging, and are killed: a rank takes up to 60 to
# shut down.
step() {
    local name=$1 group=$2 options cpus
    shift 2
    options=(--job-name="$name" --kill-on-bad-exit=0 --wait=90 --open-mode=append --output="$(log_of "$name")")
    [[ -z $group ]] || options+=(--het-group="$group")
    [[ -z $MPI_TYPE || -n ${SERVICE_AT[$name]-} ]] || options+=(--mpi="$MPI_TYPE") # for engines only
    cpus=$(of_group SLURM_CPUS_PER_TASK "$group")
    [[ -z $cpus ]] || options+=(--cpus-per-task="$cpus") # srun does not inherit this from sbatch
    mkdir -p "$RESULTS_DIR/$name"
    rm -f "$RESULTS_DIR/$name/requeue" # from an earlier run; ranks that fail early do not get to remove it
    in_step "${options[@]}" -- "$@" &
    STARTED=$!
    say "$name started, it writes to $(log_of "$name")"
}

# first_host [GROUP]: the host of a component's rank 0.
first_host() {
    local hosts
    hosts=$(scontrol show hostnames "$(of_group SLURM_JOB_NODELIST "${1-}")")
    printf '%s' "${hosts%%$'\n'*}"
}

log_of() { printf '%s' "$RESULTS_DIR/$1/output-$SLURM_JOB_ID.log"; }

show_log() {
    say "the end of $(log_of "$1"):"
    tail -n 25 "$(log_of "$1")" || true
}

is_running() { kill -0 "$1" 2>/dev/null; }

# pause: wait for a second, or until a signal. Bash runs traps between commands only, except during `wait`.
pause() {
    sleep 1 &
    wait $! || true
}

# status_of PID: put the exit status of a component that has ended into STATUS.
status_of() {
    STATUS=0
    wait "$1" || STATUS=$?
}

# wait_until_ended PID SECONDS
wait_until_ended() {
    local end=$((SECONDS + $2))
    while is_running "$1" && ((SECONDS < end)); do pause; done
    ! is_running "$1"
}

# end_component NAME PID SECONDS: SIGTERM to its ranks; SIGKILL to what is left after SECONDS.
end_component() {
    local step='' tries
    is_running "$2" || return 0
    # Not by a signal to srun, which would forward SIGTERM and kill the ranks right after.
    for tries in 1 2 3; do # Slurm's controller may be busy
        step=$(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format='%i %j' | sed -n "s/ $1\$//p") || true
        if [[ -n $step ]] && scancel --signal=TERM "$step"; then
            wait_until_ended "$2" "$3" || kill_component "$1" "$2"
            return 0
        fi
        pause
    done
    say "SIGTERM did not reach the $1 in $tries tries" >&2
    kill_component "$1" "$2"
}

# kill_component NAME PID
kill_component() {
    is_running "$2" || return 0
    say "ending the $1"
    # If it has ended just now, kill fails, which must not end this script. On SIGTERM srun kills its step.
    kill -TERM "$2" 2>/dev/null || true
    wait_until_ended "$2" 60 || kill -KILL "$2" 2>/dev/null || true
}

# is_ready HOST PORT: whether the service there answers 200 on /v2/health/ready.
is_ready() {
    # shellcheck disable=SC2016  # the inner bash expands $0 and $1
    timeout 5 bash -c 'exec 3<>"/dev/tcp/$0/$1" && printf "GET /v2/health/ready HTTP/1.0\r\n\r\n" >&3 && head -n 1 <&3' \
        "$1" "$2" 2>/dev/null | grep -q '^HTTP/[0-9.]* 200 '
}

# ---- stopping and starting again ----------------------------------------------------------------

# on_signal NAME SIGNAL: ask the trainer for a checkpoint.
#
# SIGUSR1 comes before the time limit and, where the cluster is set up so, before preemption (#SBATCH --signal). SIGTERM
# means that Slurm ends the job: the ranks have received it from Slurm, too, and SIGKILL follows after KillWait seconds.
on_signal() {
    STOPPING=$2
    say "got SIG$2; asking the $1 to write a checkpoint and to end"
    [[ -z $TRAINER ]] || kill -USR1 "$TRAINER" 2>/dev/null || true
}

# Until there is a component to forward signals to, only note them.
trap 'STOPPING=USR1' USR1
trap 'STOPPING=TERM' TERM

# stop_on_signals NAME PID: from now on forward signals to this component.
stop_on_signals() {
    TRAINER=$2
    # shellcheck disable=SC2064  # the name is to be expanded now
    trap "on_signal '$1' USR1" USR1
    # shellcheck disable=SC2064
    trap "on_signal '$1' TERM" TERM
    [[ -n $STOPPING ]] || return 0
    pause # a process that was forked just now may still have our traps, and lose the signal
    on_signal "$1" "$STOPPING"
}

# finish NAME STATUS: end the batch script as the trainer NAME has ended.
finish() {
    local status=$2
    # SIGUSR1 kills a process that does not handle it yet (138). Whatever status srun makes of the ranks' statuses, the
    # file `requeue` says that they stopped early.
    if [[ -e $RESULTS_DIR/$1/requeue || (-n $STOPPING && $status == 138) ]]; then status=$EXIT_REQUEUE; fi
    if ((status == 0)); then
        say "the $1 has finished"
    elif ((status != EXIT_REQUEUE)); then
        say "the $1 ended with status $status" >&2
        show_log "$1" >&2
    elif [[ $STOPPING == TERM ]]; then
        # Slurm knows: preempted jobs run again, cancelled ones must not.
        say "the $1 stopped early, and whether it runs again is Slurm's decision"
    elif ((${SLURM_RESTART_COUNT:-0} >= MAX_REQUEUES)); then
        say "the $1 stopped early, as $MAX_REQUEUES times before (MAX_REQUEUES): submit it again with RESULTS_DIR=$RESULTS_DIR" >&2
    else
        say "the $1 stopped early, and goes on when Slurm starts this job again"
        trap '' USR1 TERM
        scontrol requeue "$SLURM_JOB_ID" ||
            say "it could not be requeued: submit it again with RESULTS_DIR=$RESULTS_DIR" >&2
    fi
    exit "$status"
}

# train NAME SCRIPT OVERRIDE...: a job of this one trainer, from start to finish.
train() {
    start "$1" "" "${@:2}"
    train_beside_services "$1" "$STARTED"
}

# ---- a trainer and the services that it asks ----------------------------------------------------

# serve NAME HOST PORT: start a service, which the function start_NAME does, and look after it from now on.
serve() {
    SERVICE_AT[$1]="$2 $3" SERVICE_RESTARTS[$1]=0 SERVICE_WAS_READY[$1]=
    begin_service "$1"
}

begin_service() { # no start_NAME: a plan's services have such names
    "start_$1"
    SERVICE_PROCESS[$1]=$STARTED SERVICE_STATE[$1]=starting
}

# train_beside_services NAME PROCESS: from the start of this trainer to the end of the job.
train_beside_services() {
    local service status seconds=${CRITIC_STOP_SECONDS-0}
    stop_on_signals "$1" "$2"
    while is_running "$2"; do
        for service in "${!SERVICE_AT[@]}"; do look_after "$service" "$1" "$2"; done
        pause
    done
    status_of "$2"
    status=$STATUS
    # After a stop signal Slurm's limit is near, and a service's state is on disk like the trainer's.
    if [[ -n $STOPPING ]] && ((seconds > 20)); then seconds=20; fi
    for service in "${!SERVICE_AT[@]}"; do
        end_component "$service" "${SERVICE_PROCESS[$service]}" "$seconds"
        status_of "${SERVICE_PROCESS[$service]}"
        ((STATUS == 0)) || say "the $service ended with status $STATUS" >&2
    done
    finish "$1" "$status"
}

# look_after SERVICE TRAINER PROCESS: say when it is ready; replace it when it has ended.
look_after() {
    local at=${SERVICE_AT[$1]}
    # shellcheck disable=SC2086  # host and port
    if [[ ${SERVICE_STATE[$1]} == starting ]] && is_ready $at; then
        SERVICE_STATE[$1]=ready SERVICE_WAS_READY[$1]=yes
        say "the $1 is ready at ${at/ /:}"
    fi
    # After SIGTERM it is Slurm that has ended the service.
    if ! is_running "${SERVICE_PROCESS[$1]}" && [[ $STOPPING != TERM ]]; then replace "$@"; fi
}

# replace SERVICE TRAINER PROCESS: the service has ended while the trainer runs. Restart it, or end the job.
replace() {
    status_of "${SERVICE_PROCESS[$1]}"
    say "the $1 ended with status $STATUS while the $2 runs" >&2
    show_log "$1" >&2
    if [[ -z ${SERVICE_WAS_READY[$1]} ]] || ((SERVICE_RESTARTS[$1] >= CRITIC_RESTARTS)); then
        if [[ -n ${SERVICE_WAS_READY[$1]} ]]; then
            say "giving up after ${SERVICE_RESTARTS[$1]} restarts" >&2
        else
            say "it was never ready" >&2
        fi
        kill_component "$2" "$3"
        exit $((STATUS ? STATUS : 1))
    fi
    SERVICE_RESTARTS[$1]=$((SERVICE_RESTARTS[$1] + 1))
    say "restart ${SERVICE_RESTARTS[$1]} of the $1, $CRITIC_RESTARTS at most"
    begin_service "$1"
}
