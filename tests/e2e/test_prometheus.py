"""A real Prometheus scrapes the installed demo, and PromQL gives the answers that ceilingd is for."""

from __future__ import annotations

import urllib.request
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.installed import Daemon
    from support.prometheus import Prometheus

pytestmark = pytest.mark.e2e


def test_the_target_is_up_and_every_sample_is_taken(scraped_demo: Prometheus) -> None:
    [up] = scraped_demo.wait_for("up")
    assert up.value == 1
    [dropped] = scraped_demo.query("scrape_samples_scraped - scrape_samples_post_metric_relabeling")
    assert dropped.value == 0


def test_the_ceiling_is_the_one_derived_from_the_model_and_the_hardware(scraped_demo: Prometheus) -> None:
    # 4 tokens in the round of 42.6 to 42.8 ms that two A6000 at 768 GB/s need for Qwen3.6-27B with three MTP steps.
    [ceiling] = scraped_demo.wait_for('ceilingd_decode_ceiling_tokens_per_second{acceptance="perfect",bandwidth="peak"}')
    assert ceiling.value == pytest.approx(93.7, abs=0.4)


def test_the_components_sum_to_the_round(scraped_demo: Prometheus) -> None:
    [ratio] = scraped_demo.wait_for(
        'sum by (server, dp_rank) (ceilingd_decode_component_seconds{bandwidth="peak"})'
        ' / on (server, dp_rank) ceilingd_decode_round_seconds{source="predicted_peak"}'
    )
    assert ratio.value == pytest.approx(1, abs=1e-9)


def test_a_server_under_load_stays_below_its_ceiling(scraped_demo: Prometheus) -> None:
    [efficiency] = scraped_demo.wait_for('ceilingd_decode_efficiency_ratio{bandwidth="peak"}')
    assert 0.5 < efficiency.value < 1


def test_the_demo_says_that_it_is_one(scraped_demo: Prometheus) -> None:
    [info] = scraped_demo.wait_for("ceilingd_build_info")
    assert info.labels["demo"] == "true"


@pytest.mark.usefixtures("scraped_demo")
def test_openmetrics_is_what_prometheus_gets(demo: Daemon) -> None:
    # The Accept header of Prometheus 2.42 and later, preferences as it sends them.
    accept = "application/openmetrics-text;version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    request = urllib.request.Request(f"{demo.url}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=5) as response:
        assert response.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
        assert response.read().endswith(b"# EOF\n")
