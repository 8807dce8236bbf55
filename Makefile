# make train: environment, data, training, report.   make test: environment, tests.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
MODEL ?= deepfm

.PHONY: train test ladder lint clean

train: $(VENV)/.installed
	$(RUN) -m funcrec.examples.ctr --model $(MODEL) --out runs/$(MODEL)

ladder: $(VENV)/.installed
	for model in lr fm dlrm widedeep deepfm dcnv2; do \
	  $(RUN) -m funcrec.examples.ctr --model $$model --out runs/$$model || exit 1; done

test: $(VENV)/.tested
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pytest -q -n 2

$(VENV)/.installed: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet -c .ci/constraints.txt -e ".[data,plots]"
	touch $@

$(VENV)/.tested: $(VENV)/.installed
	$(RUN) -m pip install --quiet -c .ci/constraints.txt -e ".[test,fbgemm-cpu,torchrec]"
	$(RUN) -m pip install --quiet -c .ci/constraints.txt --no-deps torchrec
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
