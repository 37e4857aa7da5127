"""Registry, apps, sentences, state, settings, the doctor's judgements and the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import write_model
from support.plans import BERT_LARGE, make_plan
from typer.testing import CliRunner

from coordinator import registry
from coordinator.apps import AppRegistry
from coordinator.cli.app import app
from coordinator.cli.output import out
from coordinator.cli.tables import plan_tables
from coordinator.config import load_settings
from coordinator.registry import DEAD_SECONDS, SUSPECT_SECONDS, WORKER_PENALTY_SECONDS, Device
from coordinator.sentences import SentenceTokenizer, batches, mean_pool, pack
from coordinator.state import SavedState, ServingGoal, StateFile
from hearth.errors import BadCheckpoint, BadRequest, BadSetting, DuplicateDevice, TextTooLong
from hearth.messages import AgentState, AgentWelcome
from hearth.security import load_credential

runner = CliRunner()

# ---- registry -------------------------------------------------------------------------------------------------------


def device(name: str = "a", boot_id: str = "boot", host: str = "10.0.0.1", last_seen: float = 100.0) -> Device:
    welcome = AgentWelcome(
        version="0.1.0", device_id="id", boot_id=boot_id, name=name, device_public_key="0" * 40, link_port=1
    )
    return Device(welcome, host, 47800, last_seen)


STATE = AgentState(boot_id="boot", worker="ready", epoch=1, failure="")


def test_a_silent_device_is_alive_then_suspect_then_dead_and_comes_back() -> None:
    known = device()
    assert registry.silent(known, 100 + SUSPECT_SECONDS - 0.1).health == "alive"
    suspect = registry.silent(known, 100 + SUSPECT_SECONDS)
    assert suspect.health == "suspect"
    assert "no answer for 1.5 s" in suspect.reason
    assert registry.silent(suspect, 100 + DEAD_SECONDS).health == "dead"
    back = registry.answered(suspect, STATE, 102.0)
    assert (back.health, back.reason, back.last_seen) == ("alive", "", 102.0)


def test_heartbeats_follow_at_once_when_one_was_missed_and_end_when_the_device_is_dead() -> None:
    now, beats = 100.0, []
    known = device(last_seen=now)
    while known.health != "dead":
        pause, patience = registry.next_beat(known, now)
        beats.append(pause)
        now += pause + patience
        known = registry.silent(known, now)
    assert beats[0] == registry.HEARTBEAT_SECONDS
    assert len(beats) >= 4
    assert now - 100.0 <= DEAD_SECONDS + 0.2


def test_a_device_whose_worker_died_is_left_out_for_a_while_unless_nobody_else_is_left() -> None:
    good, bad = device("good"), registry.punished(device("bad"), now=100.0)
    assert registry.usable([good, bad], now=101.0) == [good]
    assert registry.usable([bad], now=101.0) == [bad]
    assert registry.usable([good, bad], now=100.0 + WORKER_PENALTY_SECONDS) == [bad, good]  # by name
    assert registry.usable([registry.silent(good, 110.0)], now=110.0) == []


def test_a_cloned_device_id_is_noticed_and_a_restart_is_not_mistaken_for_it() -> None:
    known = device()
    registry.check_unique(None, known.welcome, "x", 1)
    registry.check_unique(known, known.welcome, "elsewhere", 1)  # the same run, over another network
    registry.check_unique(known, device(boot_id="new").welcome, "10.0.0.1", 47800)  # restarted in its place
    with pytest.raises(DuplicateDevice, match="copy"):
        registry.check_unique(known, device(boot_id="new").welcome, "10.0.0.2", 47800)


# ---- apps -----------------------------------------------------------------------------------------------------------


def test_apps_are_admitted_revoked_and_remembered(tmp_path: Path) -> None:
    apps = AppRegistry(tmp_path / "apps.json")
    apps.add("lamp", "k1")
    assert AppRegistry(tmp_path / "apps.json").is_admitted("k1")
    for bad in ("lamp", "Lamp", "", "a b", "x" * 33):
        with pytest.raises(BadRequest):
            apps.add(bad, "k2")
    apps.revoke("lamp")
    assert apps.is_revoked("k1")
    assert not apps.is_admitted("k1")
    assert apps.name_of("k1") == "lamp"
    with pytest.raises(BadRequest, match="no app"):
        apps.revoke("lamp")
    apps.add("lamp", "k3")
    assert (apps.names(), apps.revoked_names()) == (["lamp"], ["lamp"])


def test_a_change_of_the_file_counts_at_the_next_request(tmp_path: Path) -> None:
    first, second = (AppRegistry(tmp_path / "apps.json") for _ in range(2))
    first.add("lamp", "k1")
    assert second.is_admitted("k1")
    first.revoke("lamp")
    assert not second.is_admitted("k1")
    (tmp_path / "apps.json").write_text("{")
    with pytest.raises(BadSetting, match="cannot be read"):
        second.is_admitted("k1")


# ---- sentences ------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 100))
def test_batches_keep_the_order_and_the_bound(lengths: list[int], max_rows: int) -> None:
    found = batches(lengths, max_rows)
    assert [i for batch in found for i in batch] == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in batch) <= max_rows or len(batch) == 1 for batch in found)


def test_sums_become_normalised_means() -> None:
    ids, lengths = pack([[1, 2], [3]])
    assert (ids.tolist(), lengths.tolist()) == ([1, 2, 3], [0, 2, 3])
    pooled = mean_pool(np.array([[6.0, 8.0], [0.0, 0.0]], np.float32), lengths)
    assert pooled.tolist() == [[pytest.approx(0.6), pytest.approx(0.8)], [0.0, 0.0]]


def test_texts_that_are_too_long_are_an_error_not_cut(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    sentence = SentenceTokenizer(tmp_path)
    assert sentence.encode(["a b a"], 3) == [[0, 1, 0]]
    with pytest.raises(TextTooLong) as error:
        sentence.encode(["a", "a a a a"], 3)
    assert (error.value.index, error.value.num_tokens) == (1, 4)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadCheckpoint, match="tokenizer"):
        SentenceTokenizer(tmp_path)


# ---- state and settings ---------------------------------------------------------------------------------------------


def test_state_survives_and_damage_is_kept_aside(tmp_path: Path) -> None:
    file = StateFile(tmp_path)
    assert file.load() == SavedState()
    state = SavedState(goal=ServingGoal(model_dir="/m"), plan=make_plan(BERT_LARGE, "hmp", (1, 1)), last_epoch=7)
    file.save(state)
    assert StateFile(tmp_path).load() == state
    (tmp_path / "serving.json").write_text('{"goal": 3')
    assert file.load() == SavedState()
    assert (tmp_path / "serving.unreadable").exists()


def test_coordinator_settings_come_from_flags_then_environment() -> None:
    environ = {
        "HOME": "/h",
        "HEARTH_COORDINATOR_PORT": "5",
        "HEARTH_COORDINATOR_MDNS_INTERFACES": "1.2.3.4, 5.6.7.8",
    }
    assert load_settings({}, environ).port == 5
    assert load_settings({"port": 6}, environ).port == 6
    assert load_settings({}, environ).interfaces == ["1.2.3.4", "5.6.7.8"]
    assert load_settings({}, {"HOME": "/h"}).state_dir == Path("/h/.local/state/hearth-coordinator")
    with pytest.raises(BadSetting, match="--port"):
        load_settings({"port": 70_000}, environ)


# ---- command line ---------------------------------------------------------------------------------------------------


def run(*arguments: str, code: int = 0, text: str | None = None) -> str:
    result = runner.invoke(app, list(arguments), input=text)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


def test_every_command_explains_itself() -> None:
    for command in ("devices", "plan", "serve", "embed", "status", "doctor", "demo", "key"):
        assert "Usage" in run(command, "--help")
    for command in ("new", "show", "import", "export", "rotate", "add-app", "revoke"):
        assert "Usage" in run("key", command, "--help")


def test_keys_are_made_shown_moved_and_rotated(tmp_path: Path) -> None:
    home, other, admin = (str(tmp_path / name) for name in ("home", "other", "admin"))
    run("key", "new", "--key", home)
    assert "There is a key at" in run("key", "new", "--key", home, code=1)
    line = runner.invoke(app, ["key", "export", "--key", home]).stdout.strip()
    assert line.startswith("hearth-home-1:")
    run("key", "import", "-", "--key", other, text=line)
    assert load_credential(Path(other)) == load_credential(Path(home))
    admin_line = runner.invoke(app, ["key", "export", "--role", "admin", "--key", home]).stdout
    run("key", "import", "-", "--key", admin, text=admin_line)
    shown = json.loads(run("key", "show", "--key", admin, "--json"))
    assert shown["kind"] == "admin"
    assert shown["home_fingerprint"] == json.loads(run("key", "show", "--key", home, "--json"))["home_fingerprint"]
    assert "needs the home key" in run("key", "export", "--key", admin, code=1)
    before = load_credential(Path(home))
    run("key", "rotate", "--key", home)
    assert load_credential(Path(home)) != before
    assert load_credential(Path(home + ".old")) == before
    assert "cannot be used" in run("key", "import", "-", "--key", other, "--force", code=1, text=line[:-9])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("embed", "hello", "--key", "none"), "no key at none"),
        (("plan", "no-such-model"), "no-such-model"),
        (("plan", "MODEL", "--strategy", "magic"), "'magic' is none of auto, local"),
        (("serve", "MODEL", "--wire", "fp3"), "'fp3' is none of"),
        (("serve", "--key", "KEY", "--state-dir", "STATE"), "nothing was served here before"),
        (("serve", "MODEL", "--key", "KEY", "--plan", "no-plan.json"), "no-plan.json cannot be read"),
        (("demo", "--model", "no-such-model"), "no-such-model"),
        (("embed", "hello", "--key", "KEY", "--address", "a:b"), "'a:b' is not of the form"),
        (("serve", "CUT"), "model.safetensors cannot be used: it has"),
    ],
)
def test_mistakes_are_one_clear_line(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    run("key", "new", "--key", str(tmp_path / "key"))
    cut = write_model(tmp_path / "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    places = {"CUT": cut.parent, "MODEL": tmp_path / "model", "KEY": tmp_path / "key", "STATE": tmp_path / "state"}
    key = () if "--key" in arguments else ("--key", str(tmp_path / "key")) if arguments[0] != "demo" else ()
    output = run(*(str(places.get(argument, argument)) for argument in (*arguments, *key)), code=1)
    assert said in " ".join(output.split())


def test_a_plan_is_printed_with_bytes_against_budgets() -> None:
    with out.capture() as captured:
        out.print(*plan_tables(make_plan(BERT_LARGE, "hmp", (3, 1))))
    for expected in ("device0", "device1", "heads", "12", "3072", "384", "weights", "budget"):
        assert expected in captured.get()
