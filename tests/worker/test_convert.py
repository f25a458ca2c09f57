"""Staged receives through the transfer loop: bytes, back-pressure, and what a frozen or dead peer may hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import test_loop
from test_loop import D_BLOCKS, D_SIDE, MODEL, P_BLOCKS, TOKENS, Decode, Prefill, until

from vllm_pd_connector.config import Config
from vllm_pd_connector.errors import InvalidConfig, PeerLost, TransferError
from vllm_pd_connector.config import parse_config
from vllm_pd_connector.geometry import stage
from vllm_pd_connector.geometry.stage import Copy
from vllm_pd_connector.worker.convert import Slab
from vllm_pd_connector.worker.copies import CpuCopier, element_arrays
