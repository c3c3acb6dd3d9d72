#!/usr/bin/env bash
# Submits the job to Dataflow, with defaults that suit it; --help lists them. Runs on bash 3.2, macOS's own.
set -euo pipefail

usage() {
    cat <<'END'
usage: deploy/dataflow.sh --project P --region R --input gs://… --output gs://… --name NAME [--dry_run] [FLAG…]

  --dry_run                print the command and send nothing
  --project, --region      where Dataflow runs: the region of the buckets
  --sdk_container_image    image made by deploy/Dockerfile; without it every worker installs this package and
                           deploy/requirements-worker.txt as it starts, some minutes each
  --service_account_email  account of the workers (the project's Compute Engine account)
  --temp_location          gs:// folder for Dataflow's own files (_dataflow/temp in the output's bucket)
  --staging_location       gs:// folder for the staged package (_dataflow/staging in the output's bucket)
  --job_name               (imageshards-NAME-VERSION: Dataflow refuses a second job of that name while one runs)
  --machine_type           (e2-standard-4)
  --max_num_workers        (32)
  --disk_size_gb           (50)

Every other flag goes to `python -m beam_pipeline` as it is. PYTHON names the interpreter (.venv/bin/python).
END
}

fail() {
    echo "error: $1" >&2
    exit 2
}

# The flags for the job, each as --flag or --flag=value.
flags=()

# value_of FLAG: prints the flag's last value; nothing where it isn't given.
value_of() {
    local flag value=
    for flag in "${flags[@]}"; do
        [[ $flag != "$1="* ]] || value=${flag#*=}
    done
    printf '%s' "$value"
}

# need FLAG FIX: fails where the flag is missing or empty.
need() {
    [[ -n $(value_of "$1") ]] || fail "$1 is missing: $2"
}

# need_url FLAG PATTERN FIX: fails where the flag is given and its value hasn't that form.
need_url() {
    local value
    value=$(value_of "$1")
    # shellcheck disable=SC2053  # a pattern is wanted
    [[ -z $value || $value == $2 ]] || fail "$1 '$value': $3"
}

# default FLAG VALUE [OTHER_NAME]: adds the flag where neither it nor its other name is given.
default() {
    [[ -n $(value_of "$1") || -n $(value_of "${3:-$1}") ]] || flags+=("$1=$2")
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dry_run=
while (($#)); do
    case $1 in
        --help | -h)
            usage
            exit
            ;;
        --dry_run) dry_run=1 ;;
        --runner | --runner=*) fail "$1: leave it out, this script submits to Dataflow" ;;
        --*=*) flags+=("$1") ;;
        --*)
            if (($# > 1)) && [[ $2 != --* ]]; then
                flags+=("$1=$2")
                shift
            else
                flags+=("$1")
            fi
            ;;
        *) fail "'$1' belongs to no flag; quote a value that holds spaces" ;;
    esac
    shift
done

((${#flags[@]})) || fail "no flags; see deploy/dataflow.sh --help"
need --project "name the Google Cloud project that pays"
need --region "name the region of the buckets, such as europe-west4"
need --output "give the gs:// folder of your datasets"
need --name "give the dataset a name such as photos"
[[ -n $(value_of --manifest) ]] || need --input "give the gs:// folder whose sub-folders are classes"
for flag in --input --manifest; do
    need_url "$flag" '?*://?*' "Dataflow's workers can't read this machine's files; copy it to gs://BUCKET/…"
done
for flag in --output --temp_location --staging_location; do
    need_url "$flag" 'gs://?*' "Dataflow's workers can't write there; give gs://BUCKET/…"
done

bucket=$(value_of --output)
bucket=${bucket#gs://}
bucket=gs://${bucket%%/*}
version=$(value_of --version)
job=imageshards-$(value_of --name)-${version:-1.0.0}
default --temp_location "$bucket/_dataflow/temp"
default --staging_location "$bucket/_dataflow/staging"
default --job_name "${job//[^a-z0-9]/-}"
default --machine_type e2-standard-4 --worker_machine_type
default --autoscaling_algorithm THROUGHPUT_BASED
default --max_num_workers 32
default --disk_size_gb 50
flags+=(--no_save_main_session) # all that a worker unpickles lives in an installed module
if [[ -n $(value_of --sdk_container_image) ]]; then
    default --sdk_location container
else
    default --setup_file "$root/setup.py"
    default --requirements_file "$root/deploy/requirements-worker.txt"
    default --requirements_cache skip # the workers fetch the packages, not this machine
fi

if [[ -z ${PYTHON:-} ]]; then
    PYTHON=$root/.venv/bin/python
    [[ -x $PYTHON ]] || PYTHON=python3
fi
command=("$PYTHON" -m beam_pipeline --runner=DataflowRunner "${flags[@]}")
if [[ -n $dry_run ]]; then
    echo "would run, in $PWD:"
    printf '%q' "$PYTHON"
    printf ' %q' -m beam_pipeline --runner=DataflowRunner
    printf ' \\\n    %q' "${flags[@]}"
    echo
    exit
fi
"$PYTHON" -c 'import apache_beam, beam_pipeline' 2>/dev/null ||
    fail "$PYTHON has no imageshards[pipeline]; run make setup, or set PYTHON to one that has it"
exec "${command[@]}"
