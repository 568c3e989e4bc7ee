#!/usr/bin/env bash
# Finds a Python that suits (3.11 to 3.13, with its venv module) and hands over to setup.py beside this file.
# PYTHON=/path/to/python names one instead.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
version_ok='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'
venv_ok='import ensurepip, venv'

suits() { "$1" -c "$2" >/dev/null 2>&1; }

without_venv=""
for python in ${PYTHON:-python3.11 python3.12 python3.13 python3 python}; do
    suits "$python" "$version_ok" || continue
    if suits "$python" "$venv_ok"; then
        exec "$python" "$here/setup.py" "$@"
    fi
    without_venv="${without_venv:-$python}"
done

if [[ -n "$without_venv" ]]; then
    echo "setup: $without_venv has no venv module; install it (Debian, Ubuntu: apt-get install python3-venv) and repeat." >&2
elif [[ -n "${PYTHON:-}" ]]; then
    echo "setup: PYTHON=$PYTHON is not a Python 3.11, 3.12 or 3.13 that starts." >&2
else
    echo "setup: no Python 3.11, 3.12 or 3.13 found; install one (Debian, Ubuntu: apt-get install python3 python3-venv), or name it with PYTHON=..." >&2
fi
exit 1
