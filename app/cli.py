"""`roadmatch`: the command line.

    serve                      run the service
    add, import, jobs,         ask a running service over HTTP
    search, compare, galleries
    backup                     copy a data folder while it is served

Exit status: 0 done (search and compare: match and no_match alike), 1 an expected failure (import: also where some
pictures did not go in), 2 a wrong command line, each with one line on stderr; 130 after Ctrl-C and 141 where nobody
reads what is printed, without a word.
"""

import argparse
import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from app import terminal
from roadmatch.errors import RoadmatchError

if TYPE_CHECKING:
    Subcommands = argparse._SubParsersAction["Parser"]

EXTRAS = {"celery": "celery", "faiss": "cpu", "psycopg": "postgres", "torch": "gpu", "timm": "gpu"}
_EPILOG = "Exit status: 0 done (match and no_match alike), 1 an expected failure, 2 a wrong command line."


class Parser(argparse.ArgumentParser):
    """Its complaints are one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2."""
        self.exit(2, f"roadmatch: {' '.join(message.split())} (see `{self.prog} --help`)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status; nothing that can be expected ends in a traceback."""
    try:
        status = _run(arguments)
        if sys.stdout is not None:  # it was closed before the start
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        terminal.let_go_of_stdout()
        return 141
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        return _fail(f"{error.name} is not installed: pip install 'roadmatch[{EXTRAS[error.name]}]'")
    except argparse.ArgumentTypeError as error:  # what argparse could not see by itself
        return _fail(str(error), 2)
    except RoadmatchError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename or 'input or output'}: {error.strerror or error}")
    return status


def _run(arguments: Sequence[str] | None) -> int:
    try:
        chosen = parser().parse_args(arguments)
    except SystemExit as ended:  # after --help, --version or a complaint
        return ended.code if isinstance(ended.code, int) else 0
    status: int = chosen.run(chosen)
    return status


def parser() -> Parser:
    """The command line; a command is one function of the list, which adds its parser and sets `run`."""
    top = Parser(
        prog="roadmatch", description="Is this picture in my gallery, and where?", epilog=_EPILOG, allow_abbrev=False
    )
    top.add_argument("--version", action="version", version=f"roadmatch {version('roadmatch')}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (add_serve, add_add, add_import, add_jobs, add_search, add_compare, add_galleries, add_backup):
        add(commands)
    return top


def add_serve(commands: "Subcommands") -> None:
    """`serve`: an option a setting, over its ROADMATCH_ variable."""
    command = commands.add_parser(
        "serve", help="run the service", epilog="An option goes before its ROADMATCH_ variable.", allow_abbrev=False
    )
    option = command.add_argument
    option("--host", help="address to listen on (127.0.0.1)")
    option("--port", help="port to listen on (8000); 0: any free one")
    option("--data", type=Path, metavar="FOLDER", help="of the database and the pictures (./roadmatch-data)")
    option("--database", metavar="URL", help="sqlite:///path or postgresql://... (SQLite in the data folder)")
    option("--blobs", metavar="URL", help="s3://bucket/prefix, for pictures and uploads (in the data folder)")
    option(
        "--bundle",
        dest="bundles",
        action="append",
        type=Path,
        metavar="FOLDER",
        help="a model bundle; may be repeated, the first is the default (the one that comes with Roadmatch)",
    )
    option("--hosts", help="more names by which it may be asked, separated by commas")
    option("--allow-open", action="store_true", default=None, help="let other machines reach it without any protection")
    option("--cpus", metavar="N", help="threads for decoding and embedding (all cores)")
    option("--workers", metavar="N", help="processes that work on jobs, started when there is one (1)")
    option("--broker", metavar="URL", help="Redis by which Celery workers hear of jobs (none)")
    option("--nice", metavar="N", help="how much those processes give way to searches (10)")
    option("--device", metavar="cpu|cuda", help="where pictures are embedded (cpu)")
    option("--queue", metavar="N", help="requests that may wait for a core (64)")
    option("--body-mb", metavar="MB", help="largest request body (64)")
    option("--import-mb", metavar="MB", help="largest uploaded archive or manifest (10000)")
    option("--import-folders", metavar="FOLDERS", help="folders here that may be imported, separated by : (none)")
    option("--import-hosts", metavar="HOSTS", help="hosts whose https URLs may be imported, separated by , (none)")
    option("--receive-s", metavar="S", help="time for a request's body to arrive (30)")
    option("--shutdown-s", metavar="S", help="time for requests in flight after SIGTERM (20)")
    option("--sweep-s", metavar="S", help="age at which a picture that no row names is removed (3600)")
    command.set_defaults(run=run_serve)


def add_add(commands: "Subcommands") -> None:
    """`add`: files into a gallery."""
    command = _client_command(
        commands, "add", "add pictures to a gallery, one item a file; the gallery is made if it is not there"
    )
    command.add_argument("files", nargs="+", type=Path, metavar="FILE")
    command.add_argument("--gallery", required=True, type=name, metavar="G")
    command.add_argument("--id", type=name, help="of the item; all files are its images (default: an item a file)")
    command.add_argument("--label", help="items of one label are the same thing")
    command.add_argument("--metadata", metavar="JSON", help="a flat JSON object")
    command.set_defaults(run=run_add)


def add_import(commands: "Subcommands") -> None:
    """`import`: a folder, an archive or a manifest into a gallery, by a job."""
    command = _client_command(
        commands,
        "import",
        "import many pictures; the gallery is made if it is not there. A folder's files and an archive's members are "
        "sent. A manifest (columns id, path or url, label, metadata) is sent as it is: its paths are the server's, "
        "below its ROADMATCH_IMPORT_FOLDERS, its URLs those of its ROADMATCH_IMPORT_HOSTS.",
    )
    command.add_argument("source", type=Path, metavar="FOLDER|ZIP|TAR|CSV|JSONL")
    command.add_argument("--gallery", required=True, type=name, metavar="G")
    command.add_argument("--labels", choices=["folder"], help="label pictures by the folder that they lie in")
    command.add_argument("--detach", action="store_true", help="end when all is sent, and not when all is in")
    command.set_defaults(run=run_import)


def add_jobs(commands: "Subcommands") -> None:
    """`jobs`: a list; `jobs cancel`, `jobs failures`: one of them."""
    command = _client_command(commands, "jobs", "list the jobs, the newest first; cancel one; print what failed in one")
    command.add_argument("--gallery", type=name, metavar="G", help="of this gallery only")
    command.set_defaults(run=run_jobs)
    actions = command.add_subparsers(title="with one job", metavar="ACTION")
    for action, what, run in (
        ("cancel", "end a job; what has gone in stays", run_cancel),
        ("failures", "print every entry that did not go in, with the reason", run_failures),
    ):
        one = actions.add_parser(action, help=what, description=what, epilog=_EPILOG, allow_abbrev=False)
        one.add_argument("job", type=name, metavar="ID")
        # Without defaults: those would go over what stands before the action.
        one.add_argument("--url", default=argparse.SUPPRESS, help="of the running service")
        one.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print the service's JSON")
        one.set_defaults(run=run)


def add_search(commands: "Subcommands") -> None:
    """`search`: a file against a gallery."""
    command = _client_command(commands, "search", "is this picture in the gallery, and where?")
    command.add_argument("image", type=Path, metavar="IMAGE")
    command.add_argument("--gallery", required=True, type=name, metavar="G")
    _decides(command)
    command.add_argument("--top-k", type=int, metavar="K", help="items to show at most (10)")
    command.set_defaults(run=run_search)


def add_compare(commands: "Subcommands") -> None:
    """`compare`: a file against a file."""
    command = _client_command(commands, "compare", "do two pictures show the same thing?")
    command.add_argument("query", type=Path, metavar="A")
    command.add_argument("picture", type=Path, metavar="B")
    place = command.add_mutually_exclusive_group()
    place.add_argument("--gallery", type=name, metavar="G", help="decide as a search in this gallery does")
    place.add_argument("--bundle", metavar="ID", help="decide as in a gallery of one item (the default bundle)")
    _decides(command)
    command.set_defaults(run=run_compare)


def add_galleries(commands: "Subcommands") -> None:
    """`galleries`: a list."""
    _client_command(commands, "galleries", "list the galleries with size, rule and calibration").set_defaults(
        run=run_galleries
    )


def add_backup(commands: "Subcommands") -> None:
    """`backup`: a data folder's copy."""
    what = "copy the database and the pictures to a new data folder, also while they are served"
    command = commands.add_parser(
        "backup", help=what, description=what, epilog="Restore: roadmatch serve --data FOLDER", allow_abbrev=False
    )
    command.add_argument("folder", type=Path, metavar="FOLDER", help="to be made")
    command.add_argument("--data", type=Path, metavar="FOLDER", help="of the database and the pictures")
    command.add_argument("--database", metavar="URL", help="sqlite:///path (SQLite in the data folder)")
    command.add_argument("--blobs", metavar="URL", help="s3://bucket/prefix (in the data folder)")
    command.set_defaults(run=run_backup)


def name(text: str) -> str:
    """A gallery's name or an item's id. Raises argparse's own error."""
    from app.client import NAME

    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} does not fit {NAME.pattern}")
    return text


# What a command needs is imported when it runs: serving takes a second to import, the client a third of that.


def run_backup(chosen: Namespace) -> int:
    """A data folder's copy."""
    from app import backup

    return backup.run_backup(chosen)


def run_serve(chosen: Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C, which is how one stops it."""
    from app.main import serve
    from app.settings import Settings

    given = {key: value for key, value in vars(chosen).items() if key != "run"}
    try:
        return serve(Settings.read(**given))
    except KeyboardInterrupt:
        return 0


def run_add(chosen: Namespace) -> int:
    from app import commands

    return commands.add(chosen)


def run_import(chosen: Namespace) -> int:
    from app import job_commands

    return job_commands.import_(chosen)


def run_jobs(chosen: Namespace) -> int:
    from app import job_commands

    return job_commands.jobs(chosen)


def run_cancel(chosen: Namespace) -> int:
    from app import job_commands

    return job_commands.cancel(chosen)


def run_failures(chosen: Namespace) -> int:
    from app import job_commands

    return job_commands.failures(chosen)


def run_search(chosen: Namespace) -> int:
    from app import commands

    return commands.search(chosen)


def run_compare(chosen: Namespace) -> int:
    from app import commands

    return commands.compare(chosen)


def run_galleries(chosen: Namespace) -> int:
    from app import commands

    return commands.galleries(chosen)


def _client_command(commands: "Subcommands", command: str, what: str) -> Parser:
    new = commands.add_parser(command, help=what, description=what, epilog=_EPILOG, allow_abbrev=False)
    new.add_argument("--url", help="of the running service (ROADMATCH_URL, else http://127.0.0.1:8000)")
    new.add_argument("--json", action="store_true", help="print the service's JSON and nothing else")
    return new


def _decides(command: Parser) -> None:
    by = command.add_mutually_exclusive_group()
    by.add_argument("--rule", metavar="R", help="an operating point of the bundle (the gallery's own)")
    by.add_argument("--threshold", type=float, metavar="T", help="on the score, in place of a rule")


def _fail(message: str, status: int = 1) -> int:
    terminal.complain(message)
    return status


if __name__ == "__main__":
    sys.exit(main())
