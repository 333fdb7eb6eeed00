#!/bin/sh
# Brings Debian's etcd into the virtual environment $1, for the tests alone: nothing is installed, no service started.
# Without Debian's package index it stays away, and the tests that need it say so and are skipped.
set -u
bin=$1/bin
command -v etcd > /dev/null && exit 0
[ -x "$bin/etcd" ] && exit 0
command -v apt-get > /dev/null || exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
(cd "$work" && apt-get download -qq etcd-server > /dev/null 2>&1) || {
    [ "$(id -u)" = 0 ] && apt-get update -qq > /dev/null 2>&1
    (cd "$work" && apt-get download -qq etcd-server > /dev/null 2>&1) || exit 0
}
dpkg -x "$work"/etcd-server_*.deb "$work" && cp "$work/usr/bin/etcd" "$bin/etcd"
exit 0
