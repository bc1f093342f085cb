"""A hub on 127.0.0.1 for the real huggingface_hub and datasets: repositories in memory, and faults on demand.

It answers what these libraries ask of https://huggingface.co: a repository's info and tree, files (those in large-file
storage by a redirect, with ranges), and what an upload takes (preupload, LFS, commits, branches).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

GOOD_TOKEN = "hf_goodgoodgoodgood"
_LARGE = (".safetensors", ".parquet", ".bin", ".arrow")
_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(.*))?")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repo:
    """A repository.

    Args:
        branches: branch or tag -> commit.
        commits: commit -> files.
        is_private, gated: what it takes to read it; `gated` is the hub's reason, "" for none.
        listed: replaces the files that its info lists, path -> (size, digest).
        is_foreign: no token may write to it.
        ignored: paths that its .gitignore names.
    """

    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    is_private: bool = False
    gated: str = ""
    listed: dict[str, tuple[int, str]] = field(default_factory=dict)
    is_foreign: bool = False
    ignored: tuple[str, ...] = ()

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Adds a commit to a branch and returns it."""
        text = repr((sorted((path, digest_of(path, data)) for path, data in files.items()), branch, len(self.commits)))
        name = hashlib.sha1(text.encode()).hexdigest()
        self.commits[name] = files
        self.branches[branch] = name
        return name


@dataclass
class LocalHub:
    """The state of the hub.

    Args:
        repos: ("models" or "datasets", OWNER/NAME) -> repository.
        cuts: path -> bytes after which the connection is cut, once for each entry of the list.
        sent_instead: path -> content that is sent in place of the file's.
        statuses: part of an address -> status that is answered there, with `headers`.
        failures: beginning of a method and path -> statuses that are answered there, one after the other; 0 cuts the
            connection.
        answers: part of an address -> what is answered there.
        messages: of the commits that were taken.
        seen: what was asked, by method and path; `bytes_sent` counts files' bytes.
    """

    address: str = ""
    repos: dict[tuple[str, str], Repo] = field(default_factory=dict)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    sent_instead: dict[str, bytes] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    tokens: list[str] = field(default_factory=list)
    large: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    failures: dict[str, list[int]] = field(default_factory=dict)
    answers: dict[str, bytes] = field(default_factory=dict)
    bytes_sent: int = 0

    @property
    def storage(self) -> str:
        """The address of large files, on another host, which gets no token."""
        return self.address.replace("127.0.0.1", "localhost") + "/storage"

    def model(self, name: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Commits files to a model, which is made where it is not there; returns the commit."""
        return self.repos.setdefault(("models", name), Repo()).commit(files, branch)

    def dataset(self, name: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Commits files to a data set."""
        return self.repos.setdefault(("datasets", name), Repo()).commit(files, branch)


def digest_of(path: str, data: bytes) -> str:
    """The digest by which a hub names a file."""
    if path.endswith(_LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def local_hub() -> Iterator[LocalHub]:
    """Starts a hub and ends it."""
    hub = LocalHub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Refused(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class _Handler(BaseHTTPRequestHandler):
    state: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        path = parts.path
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.query = parse_qs(parts.query)
        self.state.seen[f"{self.command} {unquote(path)}"] += 1
        self.token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if self.token:
            self.state.tokens.append(self.token)
        try:
            for part, statuses in self.state.failures.items():
                if f"{self.command} {unquote(path)}".startswith(part) and statuses:
                    self._fail(statuses.pop(0))
                    return
            for part, answer in self.state.answers.items():
                if part in unquote(path):
                    self._send(200, answer, {"Content-Type": "application/json"})
                    return
            for part, status in self.state.statuses.items():
                if part in unquote(path):
                    raise _Refused(status, message="the hub is under maintenance" if status >= 500 else "")
            if path.startswith("/storage/"):
                if self.token:
                    raise _Refused(400)
                self._storage(unquote(path.removeprefix("/storage/")))
            elif (found := _FILE.fullmatch(path)) is not None:
                self._file("datasets" if found[1] else "models", found[2], unquote(found[3]), unquote(found[4]))
            elif path.endswith(".git/info/lfs/objects/batch"):
                self._batch()
            elif path == "/api/repos/create":
                self._create()
            elif path == "/api/validate-yaml":
                errors = [{"message": '"license" is none of ours'}] if b"license: wrong" in self.body else []
                self._json({"errors": errors, "warnings": []}, 400 if errors else 200)
            elif (found := _API.fullmatch(path)) is not None:
                self._api(found[1], found[2], found[3] or "")
            else:
                raise _Refused(404)
        except _Refused as refused:
            headers = dict(self.state.headers)
            if refused.code:
                headers["X-Error-Code"] = refused.code
            if refused.message:
                headers["X-Error-Message"] = refused.message
            self._send(refused.status, b"", headers)

    def _fail(self, status: int) -> None:
        if status == 0:
            self.close_connection = True
            return
        raise _Refused(status)

    def _repo(self, kind: str, name: str) -> Repo:
        repo = self.state.repos.get((kind, name))
        if self.token and self.token != GOOD_TOKEN:
            raise _Refused(401, message="Invalid credentials in Authorization header")
        if repo is None or (repo.is_private and not self.token):
            raise _Refused(401 if not self.token else 404, "RepoNotFound", "Repository not found")
        return repo

    def _commit(self, repo: Repo, revision: str) -> str:
        commit = repo.branches.get(revision, revision)
        if commit not in repo.commits:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    def _files(self, repo: Repo, commit: str) -> list[dict[str, Any]]:
        listed = {path: (len(data), digest_of(path, data)) for path, data in repo.commits[commit].items()}
        listed |= repo.listed
        entries = []
        for path, (size, digest) in listed.items():
            entry: dict[str, Any] = {"path": path, "size": size, "oid": digest[:40]}
            if len(digest) == 64:
                entry["lfs"] = {"sha256": digest, "oid": digest, "size": size, "pointerSize": 130}
            entries.append(entry)
        return entries

    def _api(self, kind: str, name: str, rest: str) -> None:
        repo = self._repo(kind, name)
        verb, _, tail = rest.partition("/")
        if verb in ("", "revision"):
            commit = self._commit(repo, unquote(tail) if verb else "main")
            siblings = [
                {"rfilename": one["path"], "size": one["size"], "blobId": one["oid"], "lfs": one.get("lfs")}
                for one in self._files(repo, commit)
            ]
            self._json({"id": name, "sha": commit, "siblings": siblings, "private": repo.is_private, "tags": []})
        elif verb == "tree":
            revision, _, folder = tail.partition("/")
            commit = self._commit(repo, unquote(revision))
            self._json(self._tree(repo, commit, unquote(folder), recursive="recursive" in self.query))
        elif verb == "paths-info":
            commit = self._commit(repo, unquote(tail))
            given = json.loads(self.body) if self.body.startswith(b"{") else parse_qs(self.body.decode())
            paths = given["paths"] if isinstance(given["paths"], list) else [given["paths"]]
            tree = self._tree(repo, commit, "", recursive=True)
            self._json([one for one in tree if one["path"] in paths])
        elif verb == "refs":
            branches = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": c} for n, c in repo.branches.items()]
            self._json({"branches": branches, "tags": [], "converts": []})
        elif verb == "preupload":
            self._preupload(repo, unquote(tail))
        elif verb == "branch":
            repo.branches[unquote(tail)] = repo.branches["main"]
            self._json({})
        elif verb == "commit":
            self._take_commit(repo, name, unquote(tail))
        else:
            raise _Refused(404)

    def _preupload(self, repo: Repo, branch: str) -> None:
        self._may_write(repo)
        held = repo.commits[self._commit(repo, branch)]
        answers = [
            {
                "path": one["path"],
                "uploadMode": "lfs" if one["path"].endswith(_LARGE) else "regular",
                "shouldIgnore": one["path"] in repo.ignored,
                "oid": digest_of(one["path"], held[one["path"]]) if one["path"] in held else None,
            }
            for one in json.loads(self.body)["files"]
        ]
        self._json({"files": answers})

    def _may_write(self, repo: Repo) -> None:
        if self.token != GOOD_TOKEN or repo.is_foreign:
            raise _Refused(403, message="You have read access but not the required permissions")

    def _tree(self, repo: Repo, commit: str, folder: str, *, recursive: bool) -> list[dict[str, Any]]:
        prefix = f"{folder}/" if folder else ""
        found: list[dict[str, Any]] = []
        folders: set[str] = set()
        for one in self._files(repo, commit):
            if not one["path"].startswith(prefix):
                continue
            inside = one["path"].removeprefix(prefix).split("/")[:-1]
            above = ["/".join(inside[: n + 1]) for n in range(len(inside))]
            folders.update(prefix + name for name in (above if recursive else above[:1]))
            if recursive or not inside:
                found.append({**one, "type": "file"})
        if folder and not found and not folders:
            raise _Refused(404, "EntryNotFound", "no such folder")
        return [{"type": "directory", "path": one, "oid": "0" * 40, "size": 0} for one in sorted(folders)] + found

    def _file(self, kind: str, name: str, revision: str, path: str) -> None:
        repo = self._repo(kind, name)
        if repo.gated:
            raise _Refused(403 if self.token else 401, "GatedRepo", repo.gated)
        commit = self._commit(repo, revision)
        data = repo.commits[commit].get(path)
        if data is None:
            raise _Refused(404, "EntryNotFound", "Entry not found")
        digest = digest_of(path, data)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
        if path.endswith(_LARGE):
            self.state.large[digest] = data
            headers |= {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(data))}
            headers["Location"] = f"{self.state.storage}/{digest}?path={quote(path)}"
            self._send(302, b"", headers)
            return
        self._content(path, data, headers)

    def _storage(self, digest: str) -> None:
        if self.command == "PUT":
            if hashlib.sha256(self.body).hexdigest() != digest:
                raise _Refused(400)
            self.state.large[digest] = self.body
            self._send(200, b"", {})
            return
        path = self.query["path"][0]
        self._content(path, self.state.large[digest], {"ETag": f'"{digest}"', "Accept-Ranges": "bytes"})

    def _content(self, path: str, data: bytes, headers: dict[str, str]) -> None:
        data = self.state.sent_instead.get(path, data)
        whole, start, status = len(data), 0, 200
        if (found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")) is not None:
            start, end = int(found[1]), int(found[2]) + 1 if found[2] else whole
            data, status = data[start:end], 206
            headers["Content-Range"] = f"bytes {start}-{start + len(data) - 1}/{whole}"
        cuts = self.state.cuts.get(path)
        if self.command == "GET" and cuts:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(data[: cuts.pop(0)])
            self.close_connection = True
            return
        if self.command == "GET":
            self.state.bytes_sent += len(data)
        self._send(status, data, headers)

    def _create(self) -> None:
        asked = json.loads(self.body)
        if self.token != GOOD_TOKEN:
            raise _Refused(401, message="Invalid username or password.")
        name = asked["name"] if not asked.get("organization") else f"{asked['organization']}/{asked['name']}"
        key = (f"{asked.get('type', 'model')}s", name)
        if key in self.state.repos:
            raise _Refused(409, message="You already created this model repo")
        repo = self.state.repos[key] = Repo(
            is_private=bool(asked.get("private")) or asked.get("visibility") == "private"
        )
        repo.commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        self._json({"url": f"{self.state.address}/{name}"})

    def _batch(self) -> None:
        objects = []
        for one in json.loads(self.body)["objects"]:
            entry = dict(one)
            if one["oid"] not in self.state.large:
                entry["actions"] = {"upload": {"href": f"{self.state.storage}/{one['oid']}"}}
            objects.append(entry)
        self._json({"transfer": "basic", "objects": objects})

    def _take_commit(self, repo: Repo, name: str, branch: str) -> None:
        self._may_write(repo)
        header: dict[str, Any] = {}
        files = dict(repo.commits[self._commit(repo, branch)])
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                header = value
            elif entry["key"] == "file" and value["path"] not in repo.ignored:
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.state.large[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        if header.get("parentCommit") not in (None, repo.branches.get(branch)):
            raise _Refused(412, message="A commit has happened since")
        commit = repo.commit(files, branch)
        self.state.messages.append(header["summary"])
        self._json({"commitUrl": f"{self.state.address}/{name}/commit/{commit}", "commitOid": commit, "success": True})

    def _json(self, value: object, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
