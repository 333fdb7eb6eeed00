#!/bin/sh
# Checks what `make install` cannot get from a package index: Python 3.11+ with venv and headers, a C++ compiler.
# As root on Debian the missing packages are installed; otherwise one line says what to install.
python=${PYTHON:-python3}

have_python() {
    command -v "$python" > /dev/null && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'
}
have_venv() {
    "$python" -c 'import ensurepip, venv' 2> /dev/null
}
have_headers() {
    "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))'
}

missing=""
have_python || missing="$missing python3"
have_venv || missing="$missing python3-venv"
have_headers || missing="$missing python3-dev"
command -v g++ > /dev/null || missing="$missing g++"
[ -z "$missing" ] && exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    echo "Installing Debian packages:$missing"
    apt-get update -qq > /dev/null 2>&1
    # shellcheck disable=SC2086  # a list of packages
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing > /dev/null && exit 0
fi
echo "memserve needs$missing: install them, e.g. sudo apt-get install$missing" >&2
exit 1
