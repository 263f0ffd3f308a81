# Sourced by the scripts beside it: one voice for progress and errors, and the paths everything lies at.
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
BUILD=$ROOT/build
export ROOT VENV BUILD

say() { printf '%s\n' "==> $*" >&2; }

# die WHAT-FAILED WHAT-TO-DO
die() {
	printf '%s\n' "error: $1" "hint: ${2:-see the lines above}" >&2
	exit 1
}

need_root() {
	[ "$(id -u)" -eq 0 ] || die "$0 needs root: it installs packages, loads programs and makes network namespaces" \
		"run it as root, best on a machine or in a container of its own"
}

# run LABEL COMMAND...: one line of progress; the command's output is shown only when it fails
run() {
	local label=$1 log
	shift
	say "$label"
	log=$(mktemp)
	if ! "$@" >"$log" 2>&1; then
		tail -n 40 "$log" >&2
		rm -f "$log"
		die "$label failed: $*"
	fi
	rm -f "$log"
}

# fingerprint FILE...: one hash over names and contents, so that a second run can see that nothing changed
fingerprint() {
	(cd "$ROOT" && printf '%s\0' "$@" | sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1)
}

# up_to_date STAMP HASH: true if the stamp says that this very input was done
up_to_date() { [ -f "$BUILD/stamps/$1" ] && [ "$(cat "$BUILD/stamps/$1")" = "$2" ]; }

stamp() {
	mkdir -p "$BUILD/stamps"
	printf '%s\n' "$2" >"$BUILD/stamps/$1"
}
