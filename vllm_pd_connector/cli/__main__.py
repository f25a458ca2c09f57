"""`python -m vllm_pd_connector.cli`, where the script is not on the path."""

import sys

from vllm_pd_connector.cli.app import main

sys.exit(main())
