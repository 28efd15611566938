"""translation/prepare.py: download, checks, messages. No network: urllib's opener is replaced."""

import gzip
import hashlib
import http.client
import io
import urllib.error
import urllib.request

import pytest
from processes import ENCODING, ROOT, STRICT, own_warnings, run_python

pytest.importorskip("sentencepiece", reason="the translation part needs sentencepiece")

from translation import prepare  # noqa: E402
from translation.sample import SAMPLE, split_sample  # noqa: E402

SUMS = ROOT.parent / "shared" / "multi30k" / "SHA256SUMS"
FILES = {name: gzip.compress(f"{name} eins\n{name} zwei\n".encode(), mtime=0) for name in prepare.SHA256}


class Reply(io.BytesIO):
    """What urlopen gives; `fails` is raised once the content has been read."""

    def __init__(self, content, length, fails):
        super().__init__(content)
        self.headers, self.fails = {"Content-Length": str(length)}, fails

    def read(self, size=-1):
        chunk = super().read(size)
        if not chunk and self.fails:
            raise self.fails
        return chunk


class Server:
    """Stands in for urlopen: serves FILES, spoiled by `spoil[name](content) -> content or an exception`."""

    def __init__(self):
        self.asked, self.spoil, self.cut = [], {}, {}

    def __call__(self, url, timeout):
        assert timeout > 0 and url.startswith("https://raw.githubusercontent.com/multi30k/dataset/")
        name = url.rpartition("/")[2]
        self.asked.append(name)
        content = self.spoil.get(name, FILES[name])
        if isinstance(content, Exception):
            raise content
        return Reply(content, len(FILES[name]), self.cut.get(name))


@pytest.fixture
def server(monkeypatch):
    fake = Server()
    monkeypatch.setattr(urllib.request, "urlopen", fake)
    monkeypatch.setattr(prepare, "SHA256", {n: hashlib.sha256(c).hexdigest() for n, c in FILES.items()})
    return fake


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def refused(capsys, *argv):
    """Run main, which must end with status 2 and one line on stderr -> that line."""
    with pytest.raises(SystemExit) as end:
        prepare.main([str(a) for a in argv])
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and err.count("\n") == 1
    return err


# ---------------------------------------------------------------------------------------------------- fetch


def test_fetch_brings_every_file_once(server, tmp_path):
    folder = tmp_path / "new" / "multi30k"
    assert prepare.fetch(folder) == list(FILES) == server.asked
    assert {n: (folder / n).read_bytes() for n in names(folder)} == FILES
    assert prepare.fetch(folder) == [] and len(server.asked) == len(FILES) == 8
    (folder / "val.en.gz").unlink()
    assert prepare.fetch(folder) == ["val.en.gz"] and server.asked[8:] == ["val.en.gz"]
    assert prepare.load_split(folder, "val") == (
        ["val.de.gz eins", "val.de.gz zwei"],
        ["val.en.gz eins", "val.en.gz zwei"],
    )


BROKEN = {
    "unreachable": (urllib.error.URLError(OSError(-2, "Name or service not known")), None, "Name or service"),
    "not found": (urllib.error.HTTPError("u", 404, "Not Found", {}, None), None, "Not Found"),
    "timeout": (TimeoutError("timed out"), None, "timed out"),
    "ends early": (FILES["val.de.gz"][:20], None, "20 bytes"),
    "incomplete": (FILES["val.de.gz"][:20], http.client.IncompleteRead(b"", 9), "IncompleteRead"),
    "reset in the middle": (
        FILES["val.de.gz"][:20],
        ConnectionResetError(104, "reset by peer"),
        "reset by peer",
    ),
    "wrong checksum": (gzip.compress(b"something else"), None, "sha256"),
    "login page": (b"<html>\nlog in\n</html>", None, "sha256"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_download_leaves_nothing_and_says_what_to_put_where(name, server, tmp_path, capsys):
    content, cut, word = BROKEN[name]
    server.spoil["val.de.gz"], server.cut["val.de.gz"] = content, cut
    message = refused(capsys, "--data", tmp_path)
    assert names(tmp_path) == ["train.de.gz", "train.en.gz"]  # the whole ones stay, and nothing else
    missing = [n for n in FILES if not n.startswith("train")]
    for part in (word, str(tmp_path), "--sample", prepare.URL, ", ".join(missing)):
        assert part in message
    assert "train.en.gz," not in message
    server.spoil.clear(), server.cut.clear()
    assert prepare.fetch(tmp_path) == missing  # the next run goes on from there


def test_interrupted_download_leaves_nothing_half(server, tmp_path, capsys):
    server.cut["train.en.gz"] = KeyboardInterrupt()
    assert prepare.main(["--data", str(tmp_path)]) == 130
    assert names(tmp_path) == ["train.de.gz"] and capsys.readouterr().out == ""


def test_a_file_that_differs_is_named_and_never_overwritten(server, tmp_path, capsys):
    (tmp_path / "train.de.gz").write_bytes(b"mine")
    message = refused(capsys, "--data", tmp_path)
    assert "train.de.gz" in message and "--own" in message and server.asked == []
    assert (tmp_path / "train.de.gz").read_bytes() == b"mine" and names(tmp_path) == ["train.de.gz"]


@pytest.mark.skipif(not SUMS.is_file(), reason="no ../shared/multi30k beside the project")
def test_checksums_are_the_published_ones_and_the_local_files_need_no_download(monkeypatch):
    lines = SUMS.read_text(encoding="utf-8").splitlines()
    assert prepare.SHA256 == {name: digest for digest, name in map(str.split, lines)}
    monkeypatch.setattr(urllib.request, "urlopen", None)
    assert prepare.fetch(SUMS.parent) == []


# --------------------------------------------------------------------------------------------------- splits


def test_sample_is_160_different_pairs_in_three_disjoint_splits():
    assert len(SAMPLE) == len({de for de, _ in SAMPLE}) == len({en for _, en in SAMPLE}) == 160
    splits = [split_sample(name) for name in ("train", "val", "test_2016_flickr")]
    assert [len(s) for s in splits] == [128, 16, 16]
    assert set().union(*splits) == set(SAMPLE)
    assert all(text == text.strip() and text.isprintable() for pair in SAMPLE for text in pair)
    with pytest.raises(ValueError, match="'dev': must be train, val or test"):
        split_sample("dev")


def test_load_split_of_the_sample_in_both_directions():
    de, en = prepare.load_split(None, "val")
    assert prepare.load_split(None, "val", "en", "de") == (en, de)
    assert (de[0], en[0]) == SAMPLE[0]
    with pytest.raises(ValueError, match="'fr'"):
        prepare.load_split(None, "val", "fr")


def test_load_split_reads_plain_or_gzip_and_names_what_is_missing(tmp_path):
    (tmp_path / "train.fr").write_bytes("un\nœuf".encode())
    (tmp_path / "train.en.gz").write_bytes(gzip.compress(b"one\negg\n"))
    assert prepare.load_split(tmp_path, "train", "fr", "en") == (["un", "œuf"], ["one", "egg"])
    with pytest.raises(ValueError, match=r"val\.fr"):
        prepare.load_split(str(tmp_path), "val", "fr", "en")
    (tmp_path / "train.fr").write_bytes(b"un\n")
    with pytest.raises(ValueError, match=r"train\.fr has 1 lines and .*train\.en\.gz has 2"):
        prepare.load_split(tmp_path, "train", "fr", "en")


# ------------------------------------------------------------------------------------------------- the script


def test_own_files_are_used_as_they_are(server, tmp_path, capsys):
    for split, count in (("train", 6), ("val", 2)):
        (tmp_path / f"{split}.fr").write_text("un œuf\n" * count, encoding="utf-8")
        (tmp_path / f"{split}.en").write_text("an egg\n" * (count - 1) + "\n", encoding="utf-8")
    before = names(tmp_path)
    argv = ["--own", "--data", tmp_path, "--src", "fr", "--tgt", "en"]
    assert prepare.main([str(a) for a in argv]) == 0
    out = capsys.readouterr().out
    assert "train 6, val 2; fr to en" in out and "5 of 6 kept; dropped 1 with an empty side, 0 with" in out
    assert server.asked == [] and names(tmp_path) == before


def test_multi30k_path_from_download_to_report(server, tmp_path, capsys):
    assert prepare.main(["--data", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "8 files fetched" in out and "train 2, val 2, test_2016_flickr 2, test_2017_flickr 2" in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--vocab-size", "0"], ["--vocab-size", "'0'", "at least 1"]),
        (["--sample", "--vocab-size", "100"], ["--vocab-size 100", "or more"]),
        (["--max-length", "x"], ["--max-length", "'x'", "whole number"]),
        (["--sample", "--max-length", "1"], ["--max-length 1", "128 are longer"]),
        (["--sample", "--own"], ["--own", "--sample"]),
        (["--sample", "--src", "fr"], ["--src fr", "de and en"]),
        (["--src", "en"], ["--src and --tgt", "en", "must differ"]),
        (["--own", "--data", "absent"], ["absent/train.de", "no such file"]),
        (["--sample", "--data", "absent"], ["--data", "--sample"]),
        (["--timeout", "0"], ["--timeout", "'0'"]),
        (["--nonsense"], ["--nonsense"]),
    ],
)
def test_unusable_options_are_one_line(argv, words, tmp_path, monkeypatch, capsys, server):
    monkeypatch.chdir(tmp_path)
    message = refused(capsys, *argv)
    assert all(word in message for word in words)
    assert server.asked == [] and names(tmp_path) == []


def test_script_runs_under_strict_warnings_and_help_shows_defaults(tmp_path):
    strict = [*STRICT, *ENCODING, "-m", "translation.prepare"]
    variables = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(*options):
        return run_python(*strict, *options, folder=tmp_path, **variables)

    done = run("--sample")
    assert done.returncode == 0 and not own_warnings(done.stderr), done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["data", "sentences", "subwords", "pairs", "batches"]
    assert "train 128, val 16, test 16" in lines[1] and "% padding" in lines[4]
    assert names(tmp_path) == []
    text = run("--help")
    assert text.returncode == 0 and text.stdout.count("(default:") == 8
