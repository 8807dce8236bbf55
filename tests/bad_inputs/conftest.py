"""The list of public calls lies beside the tests: `public_calls`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
