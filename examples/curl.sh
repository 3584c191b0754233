#!/usr/bin/env bash
# A writer and a reviewer in one relay session. Needs curl, and python3 to quote JSON.
set -euo pipefail

url=${RELAYKV_URL:-http://127.0.0.1:8000}
session=lamp-$$-$RANDOM

# Usage: ask SYSTEM USER; prints the answer's JSON.
ask() {
  python3 - "$1" "$2" <<'END' |
import json, sys

roles = zip(("system", "user"), sys.argv[1:])
messages = [{"role": role, "content": content} for role, content in roles]
print(json.dumps({"messages": messages, "max_tokens": 80, "temperature": 0}))
END
    curl -sS --fail-with-body "$url/v1/chat/completions" \
      -H 'Content-Type: application/json' -H "X-Relay-Session: $session" -d @-
}

# Usage: field PATH; prints one value of the JSON on stdin, `choices.0.text` for example.
field() {
  python3 -c '
import functools, json, sys

steps = [int(step) if step.isdecimal() else step for step in sys.argv[1].split(".")]
print(functools.reduce(lambda value, step: value[step], steps, json.load(sys.stdin)))' "$1"
}

draft=$(ask "You write short, plain product texts." "Write about a folding desk lamp." |
  field choices.0.message.content)
echo "Writer: $draft"

answer=$(ask "You review product texts for a shop, and you are strict." \
  "A colleague wrote this:

$draft

Say in two sentences what you would change.")
echo "Reviewer: $(field choices.0.message.content <<<"$answer")"
echo "Relayed: $(field relay.tokens.relayed <<<"$answer") tokens left as they were," \
  "$(field relay.tokens.recomputed <<<"$answer") repaired," \
  "of a prompt of $(field usage.prompt_tokens <<<"$answer")"
