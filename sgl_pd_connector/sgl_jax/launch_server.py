"""``python -m sgl_pd_connector.sgl_jax.launch_server``: sgl-jax's launcher, with disaggregation."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sgl_pd_connector.errors import ConfigError
from sgl_pd_connector.sgl_jax import compat
from sgl_pd_connector.sgl_jax.server_args import check, parse, parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a server until it is stopped. Returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "-h" in words or "--help" in words:
        sys.stdout.write(parser().format_help() + "\nand every flag of sgl-jax:\n\n")
    try:
        args, rest = parse(words)
        if args.mode == "null":
            compat.serve_plain(rest)
            return 0
        compat.check_installed()
        server_args = compat.server_args(rest)
        check(args, server_args)
    except ConfigError as error:
        sys.stderr.write(f"launch_server: {error}\n")
        return 2
    if args.mode == "decode" and not args.decode_radix_cache:
        server_args.disable_radix_cache = True
    compat.install(args)
    compat.serve(server_args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
