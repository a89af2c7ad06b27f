"""Opens a page over all episodes: `python -m rollout.view RUN|EVALUATION [OTHER]`.

The page filters and sorts them, shows the same question over the steps of a run and in two runs
side by side, and writes a selection as one page or as ATIF. With two folders, it begins with the
change of the mean score, which is printed to stderr, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import tyro
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp

from paravt_jax.data.any_path import require_local
from paravt_jax.processes.exit_codes import USER_ERRORS, exit_code
from rollout.report.episode_card import episode_card
from rollout.report.templates import environment
from rollout.serve.guard import Guard, listen
from rollout.view.atif import trajectory
from rollout.view.change import changes
from rollout.view.index import Folder, Record, Row

_HERE = pathlib.Path(__file__).parent
_MOST_CARDS = 200
"""Episodes on a static page. Each may have a hundred pictures."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of `python -m rollout.view`."""

    folder: Annotated[str, tyro.conf.Positional]
    """Folder of a run, of an evaluation, or of several evaluations (evaluations/MODEL)."""
    other: Annotated[str, tyro.conf.Positional] = ""
    """Another one, to compare with it."""
    videos: tuple[str, ...] = ()
    """Folders with the videos, if they are elsewhere. No file outside of all these is read."""
    atif: str = ""
    """File to write all episodes to, as ATIF, one per line. No page is opened."""
    port: int = 8765
    """Port of this machine's own address; 0 takes a free one."""


class Viewer:
    """The episodes of one or two folders, as a page.

    Args:
        folders: The folders, each with another name.
        videos: Folders with videos, beside these.
    """

    def __init__(self, folders: Iterable[Folder], videos: Iterable[str] = ()):
        self._folders = {folder.name: folder for folder in folders}
        self._roots = [folder.root for folder in self._folders.values()]
        self._roots += [pathlib.Path(video).resolve() for video in videos]

    def app(self) -> ASGIApp:
        """Return the page as an application."""
        routes = [
            Route("/", self._page),
            Route("/view.js", functools.partial(self._file, "view.js")),
            Route("/view.css", functools.partial(self._file, "view.css")),
            Route("/data/rows", self._rows),
            Route("/data/episode", self._episode),
            Route("/data/selection.html", self._selection, methods=["POST"]),
            Route("/data/selection.atif.jsonl", self._selection, methods=["POST"]),
        ]
        return Guard(Starlette(routes=routes))

    def rows(self) -> list[Row]:
        """Return the rows of all episodes."""
        return [row for folder in self._folders.values() for row in folder.rows()]

    def changes(self) -> list[str]:
        """Return how scores change from the first folder to the second one, as lines of text."""
        return [*changes(*self._folders.values())] if len(self._folders) > 1 else []

    def atif(self, keys: Iterable[str]) -> Iterator[str]:
        """Yield episodes as lines of ATIF."""
        for key in keys:
            yield json.dumps(trajectory(self._record(key), key), ensure_ascii=False) + "\n"

    def _page(self, request: Request) -> Response:
        template = environment(_HERE).get_template("view.html.jinja")
        page = template.render(names=[*self._folders], changes=self.changes(), most=_MOST_CARDS)
        return HTMLResponse(page)

    def _file(self, name: str, request: Request) -> Response:
        """Send the script or the style sheet of the page."""
        return FileResponse(_HERE / name, headers={"cache-control": "no-cache"})

    def _rows(self, request: Request) -> Response:
        return JSONResponse({"columns": Row._fields, "rows": self.rows()})

    def _episode(self, request: Request) -> Response:
        card = self._card(request.query_params["key"], unfolded=True)
        template = environment(_HERE).get_template("episode_card.html.jinja")
        return HTMLResponse(template.render(card=card))

    async def _selection(self, request: Request) -> Response:
        """Send the chosen episodes as a file."""
        keys = str((await request.form())["keys"]).splitlines()
        headers = {"content-disposition": "attachment"}
        if request.url.path.endswith(".jsonl"):
            return StreamingResponse(self.atif(keys), headers=headers)
        return HTMLResponse(await run_in_threadpool(self.static_page, keys), headers=headers)

    def static_page(self, keys: Sequence[str]) -> str:
        """Return one page with episodes, which loads nothing; with more than 200, the first."""
        cards = [self._card(key, unfolded=len(keys) < 4) for key in keys[:_MOST_CARDS]]
        template = environment(_HERE).get_template("selection.html.jinja")
        return template.render(names=[*self._folders], cards=cards, left_out=len(keys) - len(cards))

    def _record(self, key: str) -> Record:
        try:
            return self._folders[key.partition("/")[0]].record(key)
        except KeyError:
            raise HTTPException(404, f"There is no {key}; load the page again.") from None

    def _card(self, key: str, unfolded: bool) -> dict[str, Any]:
        record = self._record(key)
        card = episode_card(self._video(record), record, unfolded)
        where = [key.partition("/")[0]] if len(self._folders) > 1 else []
        where += [record["phase"]] if "phase" in record else []
        return card | {"facts": where + card["facts"]}

    def _video(self, record: Record) -> pathlib.Path | None:
        """Find the video of an episode in the named folders; None if it is in none of them."""
        name = record.get("file", record["video"])
        # A run that goes on names its videos as they are in their own folder.
        for path in (root / folder / name for root in self._roots for folder in ("", "videos")):
            file = path.resolve()
            if file.is_file() and any(file.is_relative_to(root) for root in self._roots):
                return file
        return None


def open_folders(settings: Settings) -> Viewer:
    """Find the episodes of the named folders.

    Raises:
        FolderError, DamagedFileError: A folder has none, or a file is damaged.
        FileNotFoundError: A folder of videos does not exist, or the one to write to.
    """
    if not pathlib.Path(settings.atif).parent.is_dir():
        raise FileNotFoundError(
            f"--atif {settings.atif}: its folder does not exist; make it, or name another file"
        )
    folders: list[Folder] = []
    for flag, path in (("folder", settings.folder), ("other", settings.other)):
        require_local(flag, path)
        if path:
            name = pathlib.Path(path).resolve().name
            same = any(folder.name == name for folder in folders)
            folders.append(Folder(path, f"{name} (2)" if same else name))
    for path in settings.videos:
        if not pathlib.Path(path).is_dir():
            raise FileNotFoundError(
                f"--videos {path}: no such folder; name one that has the videos"
            )
    return Viewer(folders, settings.videos)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. A user's mistake prints one line."""
    settings = tyro.cli(Settings, args=argv, prog="python -m rollout.view", description=__doc__)
    try:
        viewer = open_folders(settings)
        print(*viewer.changes(), sep="\n", end="\n" * bool(settings.other), file=sys.stderr)
        if settings.atif:
            with open(settings.atif, "w", encoding="utf-8") as file:
                file.writelines(viewer.atif(row.key for row in viewer.rows()))
            return 0
        listener = listen("127.0.0.1", settings.port)
    except USER_ERRORS as error:
        print(error, file=sys.stderr)
        return exit_code(error)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}/ (Ctrl-C ends it)", flush=True)
    config = uvicorn.Config(viewer.app(), log_level="warning")
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run([listener])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
