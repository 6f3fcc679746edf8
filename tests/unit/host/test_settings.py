"""The extra config: what an operator may write, and what they are told when it is wrong."""

from __future__ import annotations

import pytest

from kvferry.errors import UsageError
from kvferry.host.modes import Modes
from kvferry.host.settings import read_modes, read_settings


def test_defaults_bind_loopback_and_push():
    settings = read_settings({}, environment={})
    assert (settings.side_channel_host, settings.side_channel_port) == ("127.0.0.1", 5600)
    assert settings.advertise_host == "127.0.0.1"
    assert settings.modes == Modes("push", ("push", "pull"))
    assert settings.progress_thread is False
    assert settings.retry_bound_seconds == 30.0
    assert settings.allow_untested_nixl is False
    assert settings.backends == ("UCX",)
    assert settings.bidirectional_kv_xfer is False


def test_what_is_kept_after_a_turn_has_the_names_and_defaults_of_vllms_own_connector():
    settings = read_settings({"bidirectional_kv_xfer": True}, environment={})
    assert (
        settings.bidirectional_kv_xfer,
        settings.decoder_kv_blocks_ttl,
        settings.kv_recompute_threshold,
    ) == (True, 480.0, 64)
    assert settings.held_blocks_share == 0.2


def test_environment_is_a_fallback_and_the_config_wins():
    environment = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.7", "VLLM_NIXL_SIDE_CHANNEL_PORT": "6000"}
    settings = read_settings({}, 2, environment)
    assert (settings.side_channel_host, settings.side_channel_port) == ("10.0.0.7", 6002)
    settings = read_settings({"side_channel_host": "127.0.0.2", "side_channel_port": 7000}, 1, environment)
    assert (settings.side_channel_host, settings.side_channel_port) == ("127.0.0.2", 7001)


def test_data_parallel_ranks_have_ports_of_their_own():
    """V24: eight ranks, eight ports."""
    ports = {read_settings({}, index, {}).side_channel_port for index in range(8)}
    assert len(ports) == 8


def test_port_zero_stays_zero_for_every_rank():
    assert read_settings({"side_channel_port": 0}, 3, {}).side_channel_port == 0


def test_durations_reach_the_limits():
    settings = read_settings(
        {"kv_lease_duration": 60, "permission_seconds": 20, "renew_seconds": 4, "slice_bytes": 1 << 20},
        environment={},
    )
    assert settings.limits.lease_seconds == 60
    assert settings.limits.write_seconds == 20
    assert settings.limits.renew_seconds == 4
    assert settings.limits.slice_bytes == 1 << 20


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"side_chanel_port": 1}, ["side_chanel_port", "side_channel_port"]),
        ({"decoder_kv_blocks_ttl": 0}, ["decoder_kv_blocks_ttl", "greater than 0"]),
        ({"decoder_kv_blocks_ttl": 1e9}, ["decoder_kv_blocks_ttl", "86400"]),
        ({"held_blocks_share": 1.5}, ["held_blocks_share"]),
        ({"kv_recompute_threshold": -1}, ["kv_recompute_threshold"]),
        ({"bidirectional_kv_xfer": "yes"}, ["bidirectional_kv_xfer"]),
        ({"side_channel_port": "5600"}, ["side_channel_port"]),
        ({"side_channel_port": 65536}, ["side_channel_port", "65535"]),
        ({"side_channel_port": -1}, ["side_channel_port"]),
        ({"kv_lease_duration": 0}, ["kv_lease_duration", "greater than 0"]),
        ({"kv_lease_duration": "long"}, ["kv_connector_extra_config", "float"]),
        ({"renew_seconds": 9}, ["renew_seconds", "permission_seconds", "half"]),
        ({"waiting_blocks_share": 0}, ["waiting_blocks_share"]),
        ({"waiting_blocks_share": 1.5}, ["waiting_blocks_share"]),
        ({"quarantine_share": -0.1}, ["quarantine_share"]),
        ({"num_threads": -1}, ["num_threads"]),
        ({"switch_seconds": -0.001}, ["switch_seconds"]),
        ({"drain_seconds": -1}, ["drain_seconds"]),
        ({"backends": []}, ["backends", "UCX"]),
        ({"backends": "UCX"}, ["backends"]),
        ({"transfer_mode": "shove"}, ["transfer_mode"]),
        ({"allowed_modes": []}, ["allowed_modes", "push"]),
        ({"allowed_modes": ["shove"]}, ["allowed_modes"]),
        ({"transfer_mode": "pull", "allowed_modes": ["push"]}, ["transfer_mode", "allowed_modes", "pull"]),
        ({"side_channel_host": "0.0.0.0"}, ["advertise_host"]),
        ({"side_channel_host": "::"}, ["advertise_host"]),
        ({"test_corrupt_block": 0}, ["test_corrupt_block", "KVFERRY_TESTING"]),
    ],
)
def test_wrong_values_are_refused_by_name(extra, words):
    with pytest.raises(UsageError) as caught:
        read_settings(extra, environment={})
    for word in words:
        assert word in str(caught.value)


def test_the_secret_may_come_from_the_environment():
    """S06: arguments are logged, the environment is not."""
    environment = {"KVFERRY_SIDE_CHANNEL_SECRET": "of the environment"}
    assert read_settings({}, environment=environment).side_channel_secret == "of the environment"
    both = read_settings({"side_channel_secret": "given"}, environment=environment)
    assert both.side_channel_secret == "given"
    assert read_settings({}, environment={}).side_channel_secret is None


def test_a_port_that_is_no_number_in_the_environment_is_named():
    with pytest.raises(UsageError, match="VLLM_NIXL_SIDE_CHANNEL_PORT"):
        read_settings({}, environment={"VLLM_NIXL_SIDE_CHANNEL_PORT": "http"})


def test_a_data_parallel_index_that_leaves_the_ports_is_refused():
    with pytest.raises(UsageError, match="data-parallel"):
        read_settings({"side_channel_port": 65535}, 1, {})


def test_every_interface_needs_an_address_to_advertise():
    settings = read_settings({"side_channel_host": "0.0.0.0", "advertise_host": "10.1.2.3"}, environment={})
    assert (settings.side_channel_host, settings.advertise_host) == ("0.0.0.0", "10.1.2.3")


def test_the_test_hook_is_honoured_under_its_variable_only():
    settings = read_settings({"test_corrupt_block": 2}, environment={"KVFERRY_TESTING": "1"})
    assert settings.corrupt_block == 2


@pytest.mark.parametrize(
    ("extra", "modes"),
    [
        ({"transfer_mode": "push"}, Modes("push")),
        ({"transfer_mode": "pull"}, Modes("pull")),
        ({"allowed_modes": ["push"]}, Modes("push", ("push",))),
        ({"allowed_modes": ["pull"]}, Modes("pull", ("pull",))),
        ({"allowed_modes": ["pull", "push"]}, Modes("push", ("pull", "push"))),
    ],
)
def test_the_default_mode_is_push_unless_another_is_said_or_it_is_not_allowed(extra, modes):
    assert read_settings(extra, environment={}).modes == modes
    assert read_modes(extra | {"side_channel_port": 7000}) == modes
