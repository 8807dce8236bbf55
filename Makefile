# make train: environment, data, training, report.   make test: environment, tests.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
MODEL ?= deepfm
WITH_TOOLS = PATH="$(abspath $(VENV))/bin:$$PATH";

.PHONY: train test check coverage wheel serving kernels packages docs sanitize processors arm invariant ladder bench bench-full gpu gpu-steps clean

train: $(VENV)/.installed
	$(RUN) -m funcrec.examples.ctr --model $(MODEL) --out runs/$(MODEL)

ladder: $(VENV)/.installed
	for model in lr fm dlrm widedeep deepfm dcnv2 din; do \
	  $(RUN) -m funcrec.examples.ctr --model $$model --out runs/$$model || exit 1; done

# pip, which works on one core, installs packages while first the kernels and then the server are compiled.
test:
	$(MAKE) --jobs=2 $(VENV)/.tested serving
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pytest -q -n 3 --dist loadgroup

# What a change needs within five minutes: form, the house's rules, bad input, and the laws that start no compiler, rank or server. `test` is the whole.
check: $(VENV)/.tested
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pytest -q -rf -n 3 --dist loadgroup --alone tests/house tests/bad_inputs tests/laws --deselect tests/laws/test_right_or_raises.py

# Lines and branches of funcrec and kernels that the tests run, also in processes that they start; some twice as long as `test`.
# Tests that fail are named, and the figure is printed all the same. Two tests do not run under coverage: its hooks in forked processes keep a
# file open that one sees closed; and a traced thread of Python 3.11 never goes on while an exception set from outside waits for another thread.
UNTRACED = --deselect tests/laws/serve/test_publishers.py::test_a_forked_process_does_not_hold_the_folder \
  --deselect tests/compile/test_interrupts.py::test_interrupted_from_another_thread
coverage: $(VENV)/.tested serving
	rm -rf build/coverage && mkdir -p build/coverage
	-$(RUN) -m coverage run -m pytest -q -n 3 --dist loadgroup $(UNTRACED)
	$(RUN) -m coverage combine --quiet
	$(RUN) -m coverage report

# funcrec with kernels and server inside, for the torch of .venv: dist/*.whl runs where there is no compiler.
wheel: $(VENV)/.installed
	$(RUN) -m pip install --quiet -c .ci/constraints.txt cmeel-boost
	$(WITH_TOOLS) $(RUN) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist \
	  -C cmake.define.FUNCREC_SERVING=ON -C cmake.define.Python_EXECUTABLE=$(abspath $(RUN)) -C build-dir=build/wheel .

# Packages in C++ without Python: a library, and build/serving/funcrec-serve.
serving: $(VENV)/.installed
	$(WITH_TOOLS) cmake -S kernels -B build/serving -DFUNCREC_SERVING=ON -DPython_EXECUTABLE=$(abspath $(RUN)) && cmake --build build/serving --parallel 2

# The guide and the reference as a site: open build/docs/index.html.
docs: $(VENV)/.installed
	$(RUN) -m pip install --quiet -c .ci/constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet --config-file funcrec/guide/mkdocs.yml

# The C++ kernels with the compiler's sanitizers, then data races; the server: hostile requests to sums and to a package, then runs, swaps and
# deltas at once; compiled programs in buffers between pages without access, and with the address sanitizer; torch's operators, compiled beside
# eager. Not part of `test`: it builds the kernels twice. A fifth of the calls by default; SHARE=100 is all of them, some four hours on two cores.
SHARE ?= 20
OF = $$(($(SHARE) * $(1) / 100))

sanitize: $(VENV)/.tested
	command -v cmake && command -v ninja || $(RUN) -m pip install --quiet cmake ninja
	PYTHONPATH=tests $(RUN) -m programs.sanitize --mode address --count $(call OF,100000)
	PYTHONPATH=tests $(RUN) -m programs.sanitize --mode thread --count $(call OF,8000)
	PYTHONPATH=tests $(RUN) -m programs.fuzz_server --count $(call OF,100000)
	PYTHONPATH=tests $(RUN) -m programs.fuzz_server --package --count $(call OF,100000)
	PYTHONPATH=tests $(RUN) -m programs.at_once --mode address
	PYTHONPATH=tests $(RUN) -m programs.at_once --mode thread
	PYTHONPATH=tests $(RUN) -m programs.sanitize_jit --mode guard --count $(call OF,10000)
	PYTHONPATH=tests $(RUN) -m programs.sanitize_jit --mode guard --kind cells --count $(call OF,200)
	PYTHONPATH=tests $(RUN) -m programs.sanitize_jit --mode guard --kind steps --count $(call OF,100)
	PYTHONPATH=tests $(RUN) -m programs.sanitize_jit --mode address --count $(call OF,500)
	PYTHONPATH=tests $(RUN) -m programs.operators --seconds $(call OF,600)

# The laws that speak of bits and of compiled values on 1, 2 and 4 threads, with the kernels' base level, with MKL's Intel kernels, as on an AVX2
# machine, and with products whose bits follow from their shape: a table. Needs a C compiler.
processors: $(VENV)/.tested
	PYTHONPATH=tests $(RUN) -m programs.processors

# Python, torch and the kernels for aarch64 under build/arm, to run with qemu: 3 GB from Debian and PyPI, for root on Debian.
arm: $(VENV)/.tested
	command -v qemu-aarch64-static || apt-get install -y -qq qemu-user-static g++-aarch64-linux-gnu
	PYTHONPATH=tests $(RUN) -m programs.arm prepare

# The laws of `invariant` by models: bench/results/INVARIANT_TABLE.txt. aarch64 is a row of it after `make arm`.
invariant: serving
	PYTHONPATH=tests $(RUN) -m programs.invariant_table

# About ten minutes, most of it compiling: the short list (30 runs), then tables and plots.
bench: $(VENV)/.tested
	$(RUN) bench/run.py --report

# Everything, a few hours on two cores: 54 shapes of DLRM are most of it.
bench-full: $(VENV)/.tested
	$(RUN) bench/run.py --set full --seconds 20
	$(RUN) bench/donation.py
	$(RUN) bench/ml1m_epoch.py
	$(RUN) bench/report.py

# One CUDA machine, about ten minutes: the tests that run on it first, then the short list; no case is begun after 330 s, and none lasts over 120 s.
# `gpu-steps`, ten minutes more: DCNv2 and DLRM at batches to 65,536 in f32, TF32 and bf16, and attention, sampled softmax, codes, a pipeline, two ranks on one GPU.
# GPU_PYTHON: a Python that has torch with CUDA, triton, pytest-xdist, and (for the peers) fbgemm-gpu.
GPU_PYTHON ?= python3
GPU_TESTS ?= tests/kernels tests/compile/test_cuda.py tests/compile/test_replay.py
GPU_BENCH = $(GPU_PYTHON) bench/run.py --device cuda --seconds 4 --out bench/results/cuda --report
gpu:
	timeout 300 $(GPU_PYTHON) -m pytest -q -n 8 -k "triton or cuda" $(GPU_TESTS)
	$(GPU_BENCH) --groups bandwidth lookup update steps overhead --limit-s 330

gpu-steps:
	$(GPU_BENCH) --set gpu --groups steps on_device --limit-s 480

# What compiles, as packages where the system has none: cmake and ninja, the build backend, and Boost's headers for the server.
$(VENV)/.tools: .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet -c .ci/constraints.txt cmake ninja "scikit-build-core>=0.11"
	[ -e /usr/include/boost/beast.hpp ] || $(RUN) -m pip install --quiet -c .ci/constraints.txt cmeel-boost
	touch $@

$(VENV)/.installed: pyproject.toml .ci/constraints.txt kernels/CMakeLists.txt kernels/cpp/levels.json $(wildcard kernels/csrc/*) | $(VENV)/.tools
	$(WITH_TOOLS) $(RUN) -m pip install --quiet -c .ci/constraints.txt --no-build-isolation -e ".[data,plots]"
	touch $@

# In a new environment pip finds the kernels compiled, which need no package, and those packages installed that take longest.
ifeq ($(wildcard $(VENV)/.installed),)
$(VENV)/.installed: | kernels packages
endif

kernels: $(VENV)/.tools
	$(WITH_TOOLS) cmake -S kernels -B build/kernels -G Ninja -DCMAKE_BUILD_TYPE=Release && cmake --build build/kernels

packages: $(VENV)/.tools
	$(RUN) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
	  | $(RUN) -m pip install --quiet -c .ci/constraints.txt -r /dev/stdin

# funcrec itself is installed: pip adds what its extras need, and builds nothing. One pip at a time writes into the environment.
$(VENV)/.tested: $(VENV)/.installed
	$(RUN) -m pip install --quiet -c .ci/constraints.txt "funcrec[test,fbgemm-cpu,torchrec]"
	$(RUN) -m pip install --quiet -c .ci/constraints.txt --no-deps torchrec
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
