"""Runs schemathesis against the real server and engine around a tiny model.

    python tests/cases/api_check.py path/to/schemathesis [its options ...]

schemathesis reads /openapi.json and sends what the document allows, and what it forbids.
Its exit code is that of this script: 0 when no answer was a server error and every answer is
as the document says.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_TESTS = Path(__file__).parents[1]

for _folder in ("server", "engine"):
    sys.path.insert(0, str(_TESTS / _folder))

from byte_server import byte_server  # noqa: E402
from live_server import live_server  # noqa: E402

_CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
_EXAMPLES_PER_OPERATION = 100  # with the coverage phase more than 2,000 requests in all
_SEED = 1


def main() -> int:
    program, *options = sys.argv[1:]
    with byte_server(max_model_len=128) as server, live_server(server.state) as url:
        command = [
            program,
            "run",
            f"{url}/openapi.json",
            f"--checks={','.join(_CHECKS)}",
            f"--max-examples={_EXAMPLES_PER_OPERATION}",
            f"--seed={_SEED}",
            "--request-timeout=30",
            "--suppress-health-check=all",
            "--warnings=off",
            *options,
        ]
        exit_code = subprocess.run(command, check=False).returncode
        stats = server.core.stats()
    if stats.num_used_blocks or stats.num_running or stats.num_waiting:
        print(f"the engine is not idle afterwards: {stats}", file=sys.stderr)
        return 1
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
