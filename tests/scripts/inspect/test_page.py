"""The page in a real browser shows what the model computes."""

import math
import re
import shutil

import pytest
import torch

from fairseq_plugins import load
from scripts._shared.layer_reads import record
from scripts.inspect import __main__ as inspect
from tests.scripts.evaluate.saved_models import read_split
from tests.scripts.inspect.pages import MODELS, TOKENS, write_models, write_page

pytest.importorskip("selenium", reason="selenium is not installed")
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

BROWSER = next(filter(None, map(shutil.which, inspect.BROWSERS)), None)
DRIVER = shutil.which("chromedriver")
PATIENCE = 30.0  # seconds
LOG = """\
{"loss": "5", "num_updates": "10", "train_wall": "60"}
{"valid_loss": "4", "valid_span_mean": "40", "valid_num_updates": "10"}
{"valid_loss": "3", "valid_span_mean": "60", "valid_num_updates": "20"}
"""

pytestmark = pytest.mark.skipif(
    BROWSER is None or DRIVER is None, reason="there is no Chromium with its driver"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="module")
def pages(folder):
    (folder / "train.log").write_text(LOG, encoding="utf-8")
    return {name: write_page(folder, name, "--log", folder / "train.log") for name in MODELS}


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for option in inspect.BROWSER_OPTIONS:
        if "virtual-time" not in option and "scale" not in option:
            options.add_argument(option)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield started
    started.quit()


@pytest.fixture
def show(driver, pages):
    """Open a model's page; at the end, the browser's console must be empty."""

    def open_page(name):
        driver.set_window_size(1280, 900)
        driver.get(pages[name].as_uri())
        ready = "return document.documentElement.dataset.height"
        WebDriverWait(driver, PATIENCE).until(lambda page: page.execute_script(ready))
        return driver

    yield open_page
    assert driver.get_log("browser") == []


def all_of(page, selector):
    return page.find_elements(By.CSS_SELECTOR, selector)


def text_of(page, selector):
    (element,) = all_of(page, selector)
    return element.text


def tokens(page):
    return all_of(page, "#tokens .token")


def hover(page, element):
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    ActionChains(page).move_to_element(element).perform()
    return text_of(page, "#card")


def shown_amounts(page, selector):
    script = "return [...document.querySelectorAll(arguments[0])].map("
    script += "(token) => +token.style.getPropertyValue('--amount'))"
    return page.execute_script(script, selector)


def focused(page):
    return page.switch_to.active_element


def selected(page):
    return [
        int(token.get_attribute("data-index")) for token in all_of(page, "[aria-selected=true]")
    ]


def bits(nats):
    return f"{nats / math.log(2):.2f} bits"


@pytest.mark.parametrize("name", MODELS)
def test_pointing_at_a_token_shows_its_loss(show, folder, name):
    losses = load(folder / f"{name}.pt", folder / MODELS[name]).score_split("test")
    page = show(name)
    for index in (0, 3):
        assert bits(losses[index]) in hover(page, tokens(page)[index])
    assert len(all_of(page, "#card .rows .symbol")) == 5


def test_the_switch_shows_losses_without_the_past(show, folder):
    loaded = load(folder / "recurrent.pt", folder / "text")
    symbols = torch.tensor(read_split(loaded)[:TOKENS].astype("int64"))
    with torch.no_grad():
        scores = loaded.model(symbols[None, 7:15])[0].log_softmax(-1)[0]
    page = show("recurrent")
    colours = {token.value_of_css_property("background-color") for token in tokens(page)}
    assert len(colours) > 3
    all_of(page, "[value=without]")[0].click()
    assert bits(-scores[4, symbols[12]].item()) in hover(page, tokens(page)[12])
    all_of(page, "[value=difference]")[0].click()
    assert "the past hurt" in text_of(page, "#legend")
    # the first segment has no past, so nothing differs
    amounts = shown_amounts(page, "#tokens .token")
    assert not any(amounts[:8])
    assert any(amounts[8:])


def test_a_click_shows_the_tokens_that_were_read(show, folder):
    loaded = load(folder / "recurrent.pt", folder / "text")
    weights = {}

    def see(layer, reads):
        # of token 20, which is the fifth of its segment
        weights[layer.number] = reads.keys[:, 0, 4].flip(-1)

    source = torch.tensor([2, *read_split(loaded)[:24].astype("int64")])[None]
    past = None
    with record(loaded.model, see):
        for start in (0, 8, 16):
            _, past = loaded.model.decoder.extract_features(source[:, start : start + 8], past=past)
    page = show("recurrent")
    tokens(page)[20].click()
    label = all_of(page, "[role=radio][aria-checked=true]")[0].get_attribute("aria-label")
    layer, head = map(int, re.match(r"layer (\d+), head (\d+)", label).groups())
    # keys from the last of the segment, distance -3, to the first of the past
    expected = weights[layer][head - 1][3:]
    best = expected.topk(8)
    notes = [note.text for note in all_of(page, "#read .note")]
    assert notes == [f"distance {distance}" for distance in best.indices.tolist()]
    symbols = [symbol.text for symbol in all_of(page, "#read .symbol")]
    assert symbols == [tokens(page)[19 - d].text.strip() for d in best.indices.tolist()]
    styles = [bar.get_attribute("style") for bar in all_of(page, "#read .bar > i")]
    widths = [float(re.search(r"[\d.]+", style)[0]) for style in styles]
    assert widths == pytest.approx((100 * best.values).tolist(), abs=0.3)


@pytest.mark.parametrize(("name", "thing"), [("spans", "vector"), ("streams", "slot")])
def test_other_tokens_that_use_a_vector_or_slot_can_be_chosen(show, name, thing):
    page = show(name)
    tokens(page)[20].click()
    summaries = [x for x in all_of(page, "#panel summary") if x.text.startswith(thing)]
    summaries[0].send_keys(Keys.ENTER)
    buttons = "#panel details[open] button"
    WebDriverWait(page, PATIENCE).until(lambda page: all_of(page, buttons))[0].click()
    (other,) = selected(page)
    assert other != 20
    assert focused(page).get_attribute("data-index") == str(other)


def test_a_target_token_shows_what_it_read_of_the_source(show):
    page = show("pairs")
    tokens(page)[1].click()
    amounts = shown_amounts(page, "#source .token")
    assert max(amounts) == 75
    assert len(all_of(page, "#matrix tr")) == len(tokens(page)) + 1
    assert len(all_of(page, "#matrix tr:last-child td")) == len(amounts)


def test_a_source_token_shows_what_it_read_in_the_encoder(show, folder):
    loaded = load(folder / "pairs.pt", folder / "pairs")
    loaded.task.load_dataset("test")
    source, weights = loaded.task.dataset("test")[0]["source"], {}

    def see(layer, reads):
        if reads.keys is not None:
            weights[layer.number] = reads.keys[:, 0]

    with torch.no_grad(), record(loaded.model, see):
        loaded.model.encoder(source[None], torch.tensor([len(source)]))
    page = show("pairs")
    option = all_of(page, "#encoder-head option")[-1]
    assert option.text == "layer 2, head 2"
    option.click()
    cells = all_of(page, "#encoder-matrix td")
    for cell, weight in zip(cells, weights[2][1].flatten().tolist(), strict=True):
        assert abs(float(cell.get_attribute("title").split()[-2]) - 100 * weight) < 0.8


def test_one_figure_is_drawn_as_a_picture(folder, pages, tmp_path):
    picture = tmp_path / "spans.png"
    inspect.draw_picture(pages["spans"], "spans", picture)
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert int.from_bytes(content[16:20], "big") == 2 * inspect.PICTURE_WIDTH
    with pytest.raises(ValueError, match=r"--figure is memory: the page .* does not have it"):
        inspect.draw_picture(pages["spans"], "memory", tmp_path / "memory.png")
