#!/bin/sh
# Reports how Leasehold works on the GPUs of this host, without network. `./gpu_report --help` says more.
here=$(CDPATH="" cd -- "$(dirname -- "$0")" && pwd) || exit 1
for python in python@PYTHON@ python3; do
  if "$python" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "@PYTHON@")' 2>/dev/null; then
    exec "$python" -B "$here/tests/gpu/bootstrap.py" "$@"
  fi
done
echo "gpu_report: no Python @PYTHON@ in PATH. This kit is for that version only:" \
  "install it, or build another kit with 'make gpu-kit PY=3.N'" >&2
exit 1
