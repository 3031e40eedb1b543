#!/usr/bin/env bash
# Runs tests/interop against @copilotkit/aimock, a model server that others wrote: installs it into a temporary folder (needs npm),
# starts it on a free port of this machine and stops it at the end.
#
#   tests/interop/run.sh [pytest options]        AIMOCK_VERSION chooses another version, PYTHON another interpreter
set -euo pipefail

cd "$(dirname "$0")/../.."
folder=$(mktemp -d)
server=
finish() {
  [ -z "$server" ] || kill "$server"
  rm -rf "$folder"
}
trap finish EXIT

npm install --silent --no-fund --no-audit --prefix "$folder" "@copilotkit/aimock@${AIMOCK_VERSION:-1.43.0}"
"$folder/node_modules/.bin/llmock" --port 0 --strict --chunk-size 9 --fixtures tests/interop/fixtures.json >"$folder/log" 2>&1 &
server=$!

url=
for _ in $(seq 100); do
  url=$(grep -o 'http://127[0-9.:]*' "$folder/log" || true)
  [ -z "$url" ] || break
  kill -0 "$server" || { cat "$folder/log"; exit 1; }
  sleep 0.1
done
AIMOCK_URL=$url "${PYTHON:-.venv/bin/python}" -m pytest tests/interop "$@"
