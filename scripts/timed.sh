#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: timed.sh PART COMMAND...
#        timed.sh --table
# Runs the command and appends "PART<tab>SECONDS" to the file that MAKE_TIMES names.
# --table prints that file as one line, and removes it.
set -eu
if [ "$1" = --table ]; then
  if [ -s "$MAKE_TIMES" ]; then
    awk -F '\t' '{ printf "%s%s %d s", (NR > 1 ? ", " : "Time: "), $1, $2 } END { print "" }' \
      "$MAKE_TIMES"
    rm "$MAKE_TIMES"
  fi
  exit
fi
part=$1
shift
begin=$(date +%s)
"$@"
mkdir -p "$(dirname "$MAKE_TIMES")"
printf '%s\t%s\n' "$part" "$(($(date +%s) - begin))" >>"$MAKE_TIMES"
