"""The command: exit codes, text, JSON, gates, pictures, and the page in a real browser."""

import gzip
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_trace_analyse import SAMPLE, late
from trace_files import note, op, step, thread_name, write

from ddpx.trace.cli import main
from ddpx.trace.draw import COLOURS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def run(tmp_path):
    """A folder with the traces of two ranks, rank 1 late."""
    folder = tmp_path / "late"
    folder.mkdir()
    for rank in (0, 1):
        write(folder / f"host_{rank}.1.pt.trace.json.gz", late(200, rank), rank, 2)
    return folder


@pytest.fixture
def calm(tmp_path):
    folder = tmp_path / "calm"
    folder.mkdir()
    for rank in (0, 1):
        write(folder / f"host_{rank}.1.pt.trace.json", late(0, rank), rank, 2)
    return folder


def test_a_sound_run_is_reported_and_exits_with_0(run, capsys):
    assert main([str(run)]) == 0
    out = capsys.readouterr().out
    assert "late: 2 ranks, CPU, gloo, steps 0-4" in out
    assert "rank 1 arrives last at 5 of 10 collectives" in out
    assert "waiting for a peer" in out and "bucket 1" in out
    assert re.search(r"0 +mean of 5 +0.90 +0.20 +0.10 +0.25 +0.35 +28.6 %", out)


def test_json_holds_what_the_text_says_and_every_step_sums(run, capsys):
    assert main([str(run), "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == "ddpx-trace-report"
    (one,) = document["runs"]
    assert [rank["rank"] for rank in one["ranks"]] == [0, 1]
    for rank in one["ranks"]:
        for told in rank["steps"]:
            parts = [told[key] for key in ("compute_only_ms", "overlapped_ms", "exposed_ms", "gap_ms")]
            assert sum(parts) == pytest.approx(told["step_ms"], abs=1e-9)
            assert sum(told["idle_by_cause_ms"].values()) == pytest.approx(told["exposed_ms"] + told["gap_ms"])
    bucket = one["collectives"][0]
    assert (bucket["label"], bucket["bytes"], bucket["transfer_ms"]) == ("bucket 0", 4000, pytest.approx(0.1))
    assert bucket["busbw_bytes_per_s"] == pytest.approx(4000 / 0.1e-3)


def test_two_folders_are_two_runs_and_their_difference(run, calm, capsys):
    assert main([str(calm), str(run)]) == 0
    out = capsys.readouterr().out
    assert "from calm to late, ms a step" in out and re.search(r"step +0.90 +0.90 +\+0.00", out)
    assert re.search(r"exposed communication +0.05 +0.15 +\+0.10", out)
    assert main([str(run), "--against", str(calm)]) == 0
    assert "from calm to late" in capsys.readouterr().out


def test_a_folder_of_folders_is_a_run_each_in_the_order_of_modes(run, calm, tmp_path, capsys):
    parent = tmp_path / "profiles"
    parent.mkdir()
    shutil.move(run, parent / "overlapped")
    shutil.move(calm, parent / "bucketed")
    shutil.copytree(parent / "bucketed", parent / "torch")
    (parent / "merged_torch.perfetto.json.gz").write_bytes(b"")
    assert main([str(parent)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"ms a step +torch +bucketed +overlapped\n", out)


def test_gates(run, capsys):
    assert main([str(run), "--gate", "exposed_ms<=0.2", "--gate", "overlap>=0.1"]) == 0
    assert main([str(run), "--gate", "exposed_ms<=0.1"]) == 1
    assert "gate exposed_ms<=0.1 failed in late: exposed_ms is 0.15" in capsys.readouterr().err
    assert main([str(run), "--gate", "speed>3"]) == 2
    assert "NAME one of overlap, step_ms" in capsys.readouterr().err


def test_what_is_refused_exits_with_1_or_2_and_says_why(run, tmp_path, capsys):
    whole = next(run.glob("host_0*"))
    broken = tmp_path / "broken.json.gz"
    broken.write_bytes(whole.read_bytes()[:-20])
    plain = tmp_path / "report.json"
    plain.write_text('{"loss": [1, 2]}')
    empty = tmp_path / "empty"
    empty.mkdir()
    alone = write(tmp_path / "alone.json", [step(0, 0, 9), op(1, 2)], 0, 1)
    fewer = write(tmp_path / "fewer.json", late(200, 1, steps=4), 1, 2)
    for args, code, reason in [
        ([broken], 2, "broken.json.gz: truncated gzip"),
        ([plain], 2, 'report.json: not a torch.profiler trace: it has no "traceEvents" list'),
        ([tmp_path / "none.json"], 2, "none.json: No such file or directory"),
        ([empty], 2, "empty: no *.json or *.json.gz in it"),
        ([whole, "--steps", "9-3"], 2, "--steps 9-3: give a number or a range"),
        ([whole, "--steps", "77"], 2, "none of the steps asked for is in it; it has 0-4"),
        ([whole, whole], 2, "rank 0 is there twice"),
        ([whole, fewer], 1, "steps don't line up: rank 0 has steps 0-4, rank 1 has steps 0-3"),
        ([whole], 0, ""),
        ([alone], 0, ""),
    ]:
        assert main([*map(str, args)]) == code
        assert reason in capsys.readouterr().err


def test_nothing_is_claimed_of_communication_that_the_trace_does_not_show(tmp_path, capsys):
    path = write(tmp_path / "blind.json", [step(0, 0, 1000), op(0, 700)], 0, 2)
    assert main([str(path), "--json", "-"]) == 1
    captured = capsys.readouterr()
    assert "profile_all_threads=True" in captured.err
    (one,) = json.loads(captured.out)["runs"]
    told = one["ranks"][0]["steps"][0]
    assert told["step_ms"] == 1 and one["mean"]["compute_ms"] == 0.7
    assert [told[key] for key in ("exposed_ms", "gap_ms", "overlapped_ms", "overlap")] == [None] * 4
    assert one["mean"]["gap_ms"] is None and one["advice"] == [] and one["ranks"][0]["longest_gaps"] == []
    assert main([str(path), "--gate", "gap_ms<=5"]) == 1
    assert main([str(path), "--html", str(tmp_path / "blind.html"), "--png", str(tmp_path / "blind.png")]) == 1
    out = capsys.readouterr().out
    assert re.search(r"0 +0 +1.00 +n/a +n/a +n/a +n/a +n/a", out) and "longest stretches" not in out


def test_mode_local_is_reported_beside_the_others_as_without_communication(run, tmp_path, capsys):
    parent = tmp_path / "train"
    shutil.move(run, parent / "overlapped")
    (parent / "local").mkdir()
    alone = [step(0, 0, 1000), op(0, 700), step(1, 1000, 2000), op(1000, 1700)]
    own = [thread_name(100, "ddpx compute")]
    for rank in (0, 1):
        write(parent / "local" / f"host_{rank}.1.pt.trace.json.gz", own + alone, rank, 2)
    assert main([str(parent), "--html", str(tmp_path / "page.html")]) == 0
    out = capsys.readouterr().out
    assert "A step takes 1.0 ms: 0.7 ms (70 %) computing, no communication, 0.3 ms (30 %) with nothing running." in out
    assert re.search(r"exposed communication +0.00 +0.15", out) and "overlap n/a → 40.0 %" in out
    assert main([str(parent), "--gate", "exposed_ms<=0.2"]) == 0
    # A folder may be called local for other reasons: then communication is missing, as anywhere.
    for rank in (0, 1):
        write(parent / "local" / f"host_{rank}.1.pt.trace.json.gz", alone, rank, 2)
    assert main([str(parent)]) == 1
    assert "local: not reported: rank 0: no communication in its trace" in capsys.readouterr().err
    # And what ddpx recorded in another mode should show some.
    for rank in (0, 1):
        write(parent / "local" / f"host_{rank}.1.pt.trace.json.gz", own + alone, rank, 2)
    (parent / "local").rename(parent / "naive")
    assert main([str(parent)]) == 1
    assert "naive: not reported: rank 0: no communication in its trace" in capsys.readouterr().err


def test_importing_the_package_needs_neither_torch_nor_numpy():
    code = (
        "import sys, types\n"
        "package = types.ModuleType('ddpx'); package.__path__ = ['ddpx']; sys.modules['ddpx'] = package\n"
        "sys.modules['torch'] = sys.modules['numpy'] = sys.modules['matplotlib'] = None\n"
        "import ddpx.trace.cli, ddpx.trace.page, ddpx.trace.draw\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


# Pictures ------------------------------------------------------------------------------------------------------------


def near(image, colour):
    """How many pixels of an image (rows, columns, RGB in 0..1) have a colour given as #rrggbb."""
    wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return int((abs(image[..., :3] - wanted).max(axis=-1) < 0.03).sum())


@pytest.mark.parametrize("dark", [False, True])
def test_the_png_shows_each_class_in_its_colour(run, calm, tmp_path, dark):
    from matplotlib import image

    path = tmp_path / "steps.png"
    assert main([str(calm), str(run), "--png", str(path), *(["--dark"] if dark else [])]) == 0
    picture = image.imread(path)
    assert near(picture[:5, :5], "#14181d" if dark else "#ffffff") == 25
    assert all(near(picture, COLOURS[dark][name]) > 500 for name in ("compute", "exposed", "peer", "gap"))


def test_the_page_stands_alone(run, tmp_path):
    path = tmp_path / "page.html"
    assert main([str(run), "--html", str(path)]) == 0
    text = path.read_text()
    assert not re.findall(r"""(?:src|href|url|import|fetch)\s*[=(]\s*["']?(?!#)\S+""", text)
    assert "http" not in text and "<svg" in text and "Rank 1 arrives last" in text


def test_times_that_differ_have_words_that_differ(run, tmp_path):
    """Of a step 0.15 ms are exposed, 0.10 of them waits for rank 1; threads are blocked for 0.30 ms more."""
    for rank, file in enumerate(sorted(run.iterdir())):
        blocked = [note(1000 * k + 600, 1000 * k + 900, "ddpx:wait") for k in range(5)]
        write(file, late(200, rank) + blocked, rank, 2)
    page = tmp_path / "page.html"
    assert main([str(run), "--html", str(page)]) == 0
    text = page.read_text()
    headline = re.search(r"([\d.]+) ms \(17 %\) of exposed communication, waits for peers included", text)
    bars = re.findall(r"<title>exposed communication, less waits for a peer: ([\d.]+) ms a step", text)
    causes = re.search(r"communicating, or a thread blocked on it ([\d.]+) ms", text)
    assert headline and causes and "waiting for communication" not in text
    assert float(headline[1]) == pytest.approx(0.15, abs=0.051)
    assert [*map(float, bars)] == [0.05, 0.05] and float(causes[1]) == 0.35


def test_names_in_a_trace_cannot_break_out_of_the_page(tmp_path):
    evil = "</script><script>alert(1)</script>&\"'"
    events = [step(0, 0, 100), note(0, 100, evil), op(0, 20, evil), op(60, 80, evil)]
    path = write(tmp_path / "evil.json", events, 0, 1)
    page = tmp_path / "page.html"
    assert main([str(path), "--html", str(page)]) == 0
    assert "<script>alert" not in page.read_text() and "alert(1)" in page.read_text()


def browse(page, *flags, fragment=""):
    """Run headless Chromium on a file; returns its standard output."""
    profile = page.parent / "profile"
    quiet = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    quiet += " --disable-component-update --disable-sync --hide-scrollbars --window-size=1280,1400"
    command = [CHROMIUM, *quiet.split(), f"--user-data-dir={profile}", *flags, page.as_uri() + fragment]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@needs_chromium
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_chromium_shows_the_page_in_light_and_dark(run, calm, tmp_path, theme):
    from matplotlib import image

    page, shot = tmp_path / "page.html", tmp_path / "shot.png"
    assert main([str(calm), str(run), "--html", str(page)]) == 0
    browse(page, f"--screenshot={shot}", fragment=f"#{theme}")
    picture = image.imread(shot)
    dark = theme == "dark"
    assert near(picture[:5, :5], "#14181d" if dark else "#ffffff") == 25
    assert all(near(picture, COLOURS[dark][name]) > 500 for name in ("compute", "exposed", "peer", "gap"))


@needs_chromium
def test_in_chromium_buttons_and_dragging_zoom_and_pointing_tells(run, tmp_path):
    page = tmp_path / "page.html"
    assert main([str(run), "--html", str(page)]) == 0
    probe = """<script>
    const out=[],box=()=>document.querySelector('.timeline .data').getAttribute('viewBox');
    const svg=document.querySelector('.timeline'),rect=svg.getBoundingClientRect();
    const at=(type,x,y)=>svg.dispatchEvent(new PointerEvent(type,{pointerId:1,bubbles:true,
      clientX:rect.left+rect.width*(LABELS+x*(WIDTH-LABELS))/WIDTH,clientY:rect.top+rect.width*y/WIDTH}));
    svg.setPointerCapture=()=>{};
    out.push(box());
    document.querySelector('[data-step="2"]').click();out.push(box());
    at('pointermove',.15,RUNS[0].ranks[0].commY+5);out.push(document.getElementById('tip').innerText);
    at('pointermove',.05,RUNS[0].ranks[0].y+5);out.push(document.getElementById('tip').innerText);
    at('pointerdown',.25,40);at('pointermove',.5,40);at('pointerup',.5,40);out.push(box());
    svg.dispatchEvent(new MouseEvent('dblclick'));out.push(box());
    document.getElementById('theme').click();out.push(document.documentElement.dataset.theme);
    document.title=JSON.stringify(out);
    </script></body>"""
    page.write_text(page.read_text().replace("</body>", probe))
    title = re.search(r"<title>(.*?)</title>", browse(page, "--dump-dom", fragment="#light")).group(1)
    whole, second, comm, compute, dragged, again, theme = json.loads(title.replace("&quot;", '"').replace("&amp;", "&"))
    assert whole == again and theme == "dark"
    start, _, width, _ = map(float, second.split())
    assert (start, width) == (2000, 900)
    low, _, part, _ = map(float, dragged.split())
    assert low == pytest.approx(start + 0.25 * width, abs=1) and part == pytest.approx(0.25 * width, abs=1)
    assert comm.startswith("rank 0, step 2, 0.135 ms into it") and "bucket 0, all_reduce of 4 kB" in comm
    assert "0.200 ms waiting for a peer, 0.100 transfer" in comm
    assert "computing for 0.100 ms" in compute


# Size ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_50_mb_trace_takes_under_2_seconds_of_cpu_and_150_mb(tmp_path):
    shapes = {"External id": 1, "Record function id": 0, "Concrete Inputs": ["", "", "", ""], "Ev Idx": 5}
    shapes |= {"Input type": ["float", "float", "Scalar"], "Input Strides": [[64, 1], [64, 1], []]}
    shapes |= {"Input Dims": [[32, 64], [64, 64], []], "Sequence number": 77, "Fwd thread id": 0}
    events = []
    for k in range(10):
        t = 200_000 * k
        events.append(step(k, t, t + 190_000))
        for i in range(3000):
            a = t + 60 * i
            names = ["autograd::engine::evaluate_function: AddmmBackward0", "aten::addmm", "aten::copy_", "aten::t"]
            events += [op(a + j, a + 50 - j, name, **shapes) for j, name in enumerate(names)]
        events += late(0, 0, steps=1)[3:]
    path = write(tmp_path / "rank0.json", events, 0, 1)
    assert path.stat().st_size > 45e6
    code = (
        "import sys, types, time\n"
        "package = types.ModuleType('ddpx'); package.__path__ = ['ddpx']; sys.modules['ddpx'] = package\n"
        "from ddpx.trace.cli import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "print(time.process_time(), int(peak.split()[1]) / 1024, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    cpu_s, rss_mb = map(float, done.stderr.split())
    assert cpu_s < 2 and rss_mb < 150


@pytest.mark.skipif(not SAMPLE.exists(), reason=f"the sample trace {SAMPLE.name} is not in ../shared/data")
def test_the_sample_prints_htas_number_and_cut_short_it_is_refused(tmp_path, capsys):
    assert main([str(SAMPLE)]) == 0
    assert "overlap by HTA's definition (last step dropped): rank 0 14.31 %" in capsys.readouterr().out
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(SAMPLE.read_bytes()[:300_000])
    assert main([str(cut)]) == 2
    assert "cut.json.gz: truncated gzip" in capsys.readouterr().err
    plain = tmp_path / "plain.json"
    plain.write_bytes(gzip.decompress(SAMPLE.read_bytes()))
    assert main([str(plain), "--json", "-"]) == 0
    assert round(100 * json.loads(capsys.readouterr().out)["runs"][0]["ranks"][0]["overlap_hta"], 2) == 14.31
