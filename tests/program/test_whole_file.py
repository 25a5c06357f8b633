"""A file is the old one or the new one, never a part of either, and nothing lies beside it."""

import os
import resource
import stat
import threading
from pathlib import Path

import pytest

from distmega.whole_file import replace_file, replace_text, require_writable


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "page.html"
    found.write_text("old")
    return found


def test_the_new_text_takes_the_old_one_s_place(path: Path):
    replace_text(path, "neu: é\n")
    assert path.read_bytes() == "neu: é\n".encode()
    assert os.listdir(path.parent) == ["page.html"]


def test_readers_see_the_old_file_until_the_end(path: Path):
    with replace_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_what_is_interrupted_leaves_the_old_file_alone(path: Path, error: type[BaseException]):
    def write() -> None:
        with replace_file(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(error):
        write()
    assert path.read_text() == "old"
    assert os.listdir(path.parent) == ["page.html"]


def test_a_full_disk_leaves_the_old_file_alone(path: Path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # stands in for the disk's end
    try:
        with pytest.raises(OSError, match="File too large"):
            replace_text(path, "x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "old"
    assert os.listdir(path.parent) == ["page.html"]


def test_a_link_stays_and_leads_to_the_new_file(path: Path):
    link = path.with_name("link")
    link.symlink_to(path.name)
    replace_text(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"


def test_what_is_no_regular_file_is_written_to_and_stays(tmp_path: Path):
    pipe, found = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    replace_text(pipe, "new")
    reader.join(timeout=10)
    assert found == ["new"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_permissions_are_those_asked_for_less_the_umask(tmp_path: Path):
    before = os.umask(0o027)
    try:
        for mode in (0o666, 0o600):
            with replace_file(tmp_path / f"{mode}", mode) as file:
                file.write(b"x")
    finally:
        os.umask(before)
    found = [stat.S_IMODE((tmp_path / f"{mode}").stat().st_mode) for mode in (0o666, 0o600)]
    assert found == [0o640, 0o600]


def test_room_is_looked_for_without_a_trace(path: Path):
    for each in (path, path.with_name("new")):
        require_writable(each)
    assert os.listdir(path.parent) == ["page.html"]
    assert path.read_text() == "old"


@pytest.mark.parametrize("name", ["", "missing/page.html", "page.html/page.html"])
def test_a_path_that_can_not_be_written_is_refused(path: Path, name: str):
    for write in (require_writable, lambda at: replace_text(at, "new")):
        with pytest.raises(OSError, match=r"directory|exists"):
            write(path.parent / name)
    assert os.listdir(path.parent) == ["page.html"]
