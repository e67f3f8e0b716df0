# make           builds ./train and ./plan for this machine's CPU
# make run       installs what is missing, builds, and trains a GPT on real text (DATA=file: on yours)
# make test      installs what is missing, builds and runs every test (ONLY="gpt pipeline": these; SANITIZE=address,undefined)
# make test-full the same with the exhaustive matrices
# make bench     times training on this machine: shares of its GEMM peak, layouts against one process
# make cuda      the same sources with nvcc: build/cuda/train, plan and the tests
# make deps      installs what is missing, with apt
# make clean     removes what make has built
#
# Every program is one translation unit: train.cu, plan.cu, tests/test_*.cu, bench/bench.cu.

# What `make run` starts: all of the paper's system, on 8 ranks
RANKS  ?= 8
CONFIG ?= examples/kjv.cfg

# MPICH's own names come first: on Debian, plain mpirun may be another MPI's
MPICXX := $(firstword $(shell command -v mpicxx.mpich mpicxx 2>/dev/null) mpicxx)
MPIRUN := $(firstword $(shell command -v mpirun.mpich mpirun 2>/dev/null) mpirun)
MPI_FLAGS = $(filter -I% -L% -l% -Wl%,$(shell $(MPICXX) -show 2>/dev/null))
MPI_INCLUDES = $(filter -I%,$(MPI_FLAGS))
MPI_LIBRARIES = $(filter -L% -l% -Wl%,$(MPI_FLAGS))

# -ffast-math lets g++ vectorise exp and sums. Peeling loops by address is off: the same values at another address would be
# added in another order. 512-bit vectors are used where the processor has them.
CXX       = g++
VECTORS  := $(shell grep -qs avx512f /proc/cpuinfo && echo -mprefer-vector-width=512)
OPTIMIZE  = -O3 -march=native $(VECTORS) -ffast-math --param=vect-max-peeling-for-alignment=0
WARNINGS  = -Wall -Wextra
CXXFLAGS  = -std=c++17 $(OPTIMIZE) $(WARNINGS) $(DEFINES) -fopenmp -I. -Iplatform/cpu $(MPI_INCLUDES)
LIBRARIES = -ldnnl -lsentencepiece -lz $(MPI_LIBRARIES)
BUILD     = build/cpu

# The number format of weights in use, activations and messages: fp32, bf16 or fp16 (platform/precision.h)
PRECISION ?= fp32
ifeq ($(filter $(PRECISION),fp32 bf16 fp16),)
$(error PRECISION is "$(PRECISION)": it must be fp32, bf16 or fp16)
endif
ifneq ($(PRECISION),fp32)
BUILD    := $(BUILD)-$(PRECISION)
DEFINES   = -DPRECISION_$(if $(filter bf16,$(PRECISION)),BF16,FP16)
endif

# Leaks are not looked for: MPI keeps some memory to the end
ifdef SANITIZE
BUILD    = build/sanitize
OPTIMIZE = -O1 -g -fno-omit-frame-pointer -fsanitize=$(SANITIZE) -fno-sanitize-recover=undefined
export ASAN_OPTIONS = detect_leaks=0
endif

# The other tests' expectations are fp32's
ONLY   ?= $(if $(DEFINES),layouts,$(patsubst tests/test_%.cu,%,$(wildcard tests/test_*.cu)))
TESTS   = $(ONLY:%=$(BUILD)/test_%)
HEADERS = $(wildcard *.cu platform/*.h platform/cpu/*.h tests/*.h)
COMPILE = $(CXX) -x c++ $(CXXFLAGS) $< -o $@ $(LIBRARIES)

# Compilers at work at once
JOBS   := $(shell nproc 2>/dev/null || echo 1)

all: train plan

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

deps:
	@MAKE_DATA="$(DATA)" platform/deps.sh

# Compared, for either may be of another precision
train plan: %: $(BUILD)/% always
	@cmp -s $< $@ || { cp $< $@.new && mv $@.new $@; }
always:

$(BUILD)/%: %.cu $(HEADERS) Makefile
	@mkdir -p $(@D)
	$(COMPILE)
$(BUILD)/test_%: tests/test_%.cu $(HEADERS) Makefile
	@mkdir -p $(@D)
	$(COMPILE)
# This test trains a tokenizer
$(BUILD)/test_platform: LIBRARIES += -lsentencepiece_train
build/cuda/test_platform: CUDA_LIBRARIES += -lsentencepiece_train
# The kernels' tests with a fiber for every CUDA thread
FIBERS = $(addprefix $(BUILD)/fibers/,test_gpt test_data_parallel fiber_faults)
$(BUILD)/fibers/%: tests/%.cu $(HEADERS) Makefile
	@mkdir -p $(@D)
	$(CXX) -x c++ -DPTDP_FIBERS -O1 -std=c++17 $(WARNINGS) $(DEFINES) -fopenmp -I. -Iplatform/cpu $(MPI_INCLUDES) $< -o $@ $(LIBRARIES) -lboost_context
$(BUILD)/bench: bench/bench.cu $(HEADERS) Makefile
	@mkdir -p $(@D)
	$(COMPILE)

# The King James text: one verse a line, from Debian's `bible` program
build/data/kjv.txt:
	@mkdir -p $(@D)
	@command -v bible >/dev/null || { echo "make run: there is no \`bible\` program here; give a text: make run DATA=file.txt" >&2; exit 2; }
	@bible -f ge1:1-rev22:21 </dev/null >$@.part && mv $@.part $@

run: deps
	@$(MAKE) -j$(JOBS) --no-print-directory train $(if $(DATA),,build/data/kjv.txt)
	$(MPIRUN) -np $(RANKS) ./train --config $(CONFIG) --data-path $(or $(DATA),build/data/kjv.txt)

test: deps
	@$(MAKE) -j$(JOBS) --no-print-directory build-tests
	@BUILD=$(BUILD) TESTS_SECONDS=$(TESTS_SECONDS) tests/run $(TESTS)
test-full: export PTDP_FULL = 1
test-full: test
build-tests: $(if $(filter train checkpoint precision,$(ONLY)),$(BUILD)/train $(BUILD)/plan) $(if $(filter precision,$(ONLY)),mixed-bf16 mixed-fp16) $(if $(filter kernels,$(ONLY)),$(FIBERS)) $(TESTS)

# The programs that test_precision runs
mixed-%:
	@$(MAKE) --no-print-directory PRECISION=$* $(addprefix $(BUILD)-$*/,train test_layouts test_gpt fibers/test_gpt)

# BENCH="one parallel layouts checkpoints precision": only these tables. PYTHON: one that can import PyTorch
bench: deps
	@$(MAKE) -j$(JOBS) --no-print-directory $(BUILD)/bench $(if $(DEFINES),,bench-bf16)
	@BF16_BENCH=$(if $(DEFINES),,$(BUILD)-bf16/bench) $(BUILD)/bench $(BENCH)
bench-bf16:
	@$(MAKE) --no-print-directory PRECISION=bf16 $(BUILD)-bf16/bench

# One binary for every architecture of ours that this nvcc knows. A comma would end an argument of $(if).
comma    := ,
NVCC      = nvcc
CUDA_ARCH = $(foreach arch,80 90 100,$(if $(findstring compute_$(arch),$(shell $(NVCC) --list-gpu-arch 2>/dev/null)),-gencode arch=compute_$(arch)$(comma)code=sm_$(arch)))
NVCCFLAGS = -std=c++17 -O3 --extended-lambda -Xcompiler -Wall,-Wextra -I. $(MPI_INCLUDES)
CUDA_LIBRARIES = -lcublas -lnccl -lsentencepiece -lz $(filter -L% -l%,$(MPI_LIBRARIES))
cuda:
	@command -v $(NVCC) >/dev/null || { echo "make cuda: there is no nvcc here; it comes with the CUDA Toolkit" >&2; exit 1; }
	@$(MAKE) -j$(JOBS) --no-print-directory $(patsubst %.cu,build/cuda/%,train.cu plan.cu $(notdir $(wildcard tests/test_*.cu)))
build/cuda/%: %.cu $(HEADERS) Makefile
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) $(CUDA_ARCH) $< -o $@ $(CUDA_LIBRARIES)
build/cuda/test_%: tests/test_%.cu $(HEADERS) Makefile
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) $(CUDA_ARCH) $< -o $@ $(CUDA_LIBRARIES)

clean:
	rm -rf build train plan

.PHONY: always all help deps run test test-full build-tests bench bench-bf16 cuda clean
.DELETE_ON_ERROR:
