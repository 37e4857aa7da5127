#!/bin/bash
# Asks whether pinned packages are known to be vulnerable: audit.sh PIP_AUDIT FILE. Status 0: none is; 1: some are; 3: unknown,
# because the service cannot be reached or has no data. pip-audit reports none then, so it is first asked for one that is.
set -euo pipefail

audit() { "$1" --progress-spinner off --disable-pip --no-deps --requirement "$2" "${@:3}"; }

if ! audit "$1" <(echo 'jinja2==2.4.1') --format json 2> /dev/null | grep '"id"' > /dev/null; then
  echo "not audited: the service of known vulnerabilities cannot be reached from here, or has no data" >&2
  exit 3
fi
audit "$1" "$2"
