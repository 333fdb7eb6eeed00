#!/bin/sh
# Brings Debian's Chromium and its driver, for the tests of the dashboard alone: where this is root on a Debian without
# them. Elsewhere, and without Debian's package index, it does nothing: those tests say so and are skipped.
set -u
command -v chromium > /dev/null && command -v chromedriver > /dev/null && exit 0
command -v apt-get > /dev/null && [ "$(id -u)" = 0 ] || exit 0
install() {
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver \
        > /dev/null 2>&1
}
install || { apt-get update -qq > /dev/null 2>&1 && install; }
exit 0
