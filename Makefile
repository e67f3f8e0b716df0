# make           builds ./train and ./plan: for the GPU where there are nvcc and one, else for the CPU (BACKEND=cpu|cuda)
# make run       installs what is missing, builds, and trains a GPT on real text (DATA=file: on yours)
# make test      installs what is missing, builds and runs every test (ONLY="gpt pipeline": these; SANITIZE=address,undefined)
# make test-full the same with the exhaustive matrices
# make fuzz      feeds every parser of files with mutated bytes, SECONDS=60 each (needs clang, which it installs)
# make fuzz-config tries COUNT=100 drawn combinations of flags (SEED=1)
# make soak      2000 iterations on 8 ranks: memory, losses, checkpoints
# make bench     times training on this machine: shares of its GEMM peak, layouts against one process
# make cuda      the same sources with nvcc, for every architecture it knows: build/cuda/train, plan, tests and bench
# make gpu-check on a machine with a GPU and no package registry: builds, checks, times; the report is build/gpu-check.txt
# make gpu-carry packs what gpu-check needs beside the sources and the CUDA Toolkit into build/carry
# make lab       N=1 DIR=../lab1: writes a copy in which lab 1's exercises are to be solved (labs/1.md; N from 1 to 5)
# make grade     in such a copy: builds and runs the lab's tests; a line per exercise and a score (JSON=1: as JSON)
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
OPTIMIZE  = -O3 -march=native $(VECTORS) -ffast-math --param=vect-max-peeling-for-alignment=0 --param=vect-max-version-for-alias-checks=100
WARNINGS  = -Wall -Wextra
CXXFLAGS  = -std=c++17 $(OPTIMIZE) $(WARNINGS) $(DEFINES) -fopenmp -I. -Iplatform/cpu -Iplatform/mpi $(MPI_INCLUDES)
LIBRARIES = -ldnnl -lsentencepiece -lz $(MPI_LIBRARIES)

# The GPU where there are nvcc and one. COMM=mpi: NCCL's calls over MPI (platform/mpi/nccl.h), since NCCL refuses several
# ranks on one GPU; the default where there are fewer GPUs than `make run` has ranks
NVCC     ?= nvcc
GPUS     := $(shell command -v $(NVCC) >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -c '^GPU')
BACKEND  ?= $(if $(filter-out 0,$(GPUS)),$(if $(SANITIZE),cpu,cuda),cpu)
COMM     ?= $(if $(filter 1 2 3 4 5 6 7,$(GPUS)),mpi,nccl)
ifeq ($(filter $(BACKEND),cpu cuda)$(filter $(COMM),nccl mpi),)
$(error BACKEND is "$(BACKEND)" and must be cpu or cuda; COMM is "$(COMM)" and must be nccl or mpi)
endif
BUILD    := build/$(if $(SANITIZE),sanitize,$(BACKEND))
# A comma would end an argument of $(if)
comma    := ,
ARCHS     = $(foreach arch,80 90 100,$(if $(findstring compute_$(arch),$(shell $(NVCC) --list-gpu-arch 2>/dev/null)),-gencode arch=compute_$(arch)$(comma)code=sm_$(arch)))
CUDA_ARCH = $(if $(filter-out 0,$(GPUS)),-arch=native,$(ARCHS))
NVCCFLAGS = -std=c++17 -O3 --extended-lambda -Xcompiler -Wall,-Wextra,-fopenmp -Xptxas -warn-spills -I. $(MPI_INCLUDES)
CUDA_LIBRARIES = -lcublas $(if $(filter nccl,$(COMM)),-lnccl) -lsentencepiece -lz $(filter -L% -l%,$(MPI_LIBRARIES))
ifeq ($(BACKEND)$(COMM),cudampi)
BUILD     := $(BUILD)-mpi
NVCCFLAGS += -Iplatform/mpi
endif

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
OPTIMIZE = -O1 -g -fno-omit-frame-pointer -fsanitize=$(SANITIZE) -fno-sanitize-recover=undefined
export ASAN_OPTIONS = detect_leaks=0
endif

# In a copy that `make lab` has made: what is not written yet leaves parameters unused; compiled for a quick answer
LAB := $(or $(N),$(shell cat LAB 2>/dev/null))
ifneq ($(wildcard LAB),)
WARNINGS += -Wno-unused
OPTIMIZE  = -O1
endif
LAB_TESTS = gpt tensor_parallel pipeline data_parallel plan

# The other tests' expectations are fp32's
ONLY   ?= $(if $(DEFINES),layouts,$(patsubst tests/test_%.cu,%,$(wildcard tests/test_*.cu)))
TESTS   = $(ONLY:%=$(BUILD)/test_%)
HEADERS = $(wildcard *.cu platform/*.h platform/cpu/*.h platform/mpi/*.h tests/*.h)
ifeq ($(BACKEND),cuda)
COMPILE = $(NVCC) $(NVCCFLAGS) $(DEFINES) $(CUDA_ARCH) $< -o $@ $(CUDA_LIBRARIES)
else
COMPILE = $(CXX) -x c++ $(CXXFLAGS) $< -o $@ $(LIBRARIES)
endif

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
# These start programs and look at what they print
ifndef SANITIZE
$(addprefix $(BUILD)/test_,faults fuzz kernels plan precision train): OPTIMIZE = -O1
endif
# This test trains a tokenizer
$(BUILD)/test_platform: LIBRARIES += -lsentencepiece_train
$(BUILD)/test_platform: CUDA_LIBRARIES += -lsentencepiece_train
# The same as a GPU build with COMM=mpi has it: through host memory
$(BUILD)/staged/test_platform: tests/test_platform.cu $(HEADERS) Makefile
	@mkdir -p $(@D)
	$(CXX) -x c++ -DPTDP_STAGED $(CXXFLAGS) $< -o $@ $(LIBRARIES) -lsentencepiece_train
# The kernels' tests with a fiber for every CUDA thread
FIBERS = $(addprefix $(BUILD)/fibers/,test_gpt test_data_parallel fiber_faults)
$(BUILD)/fibers/%: tests/%.cu $(HEADERS) Makefile
	@mkdir -p $(@D)
	$(CXX) -x c++ -DPTDP_FIBERS -O1 -std=c++17 $(WARNINGS) $(DEFINES) -fopenmp -I. -Iplatform/cpu -Iplatform/mpi $(MPI_INCLUDES) $< -o $@ $(LIBRARIES) -lboost_context
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
build-tests: $(if $(filter train plan checkpoint precision fuzz faults,$(ONLY)),$(BUILD)/train $(BUILD)/plan) $(if $(filter precision,$(ONLY)),mixed-bf16 mixed-fp16) $(if $(filter platform,$(ONLY)),$(BUILD)/staged/test_platform) $(if $(filter kernels,$(ONLY)),$(FIBERS)) $(TESTS)

# The programs that test_precision runs
mixed-%:
	@$(MAKE) --no-print-directory PRECISION=$* $(addprefix $(BUILD)-$*/,train test_layouts test_gpt fibers/test_gpt)

# libFuzzer comes with clang. What it finds goes to tests/seeds/
build/fuzz/%: tests/fuzz.cu $(HEADERS) Makefile
	@mkdir -p $(@D)
	clang++ -x c++ -std=c++17 -O1 -g -fno-omit-frame-pointer -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined $(WARNINGS) -I. -Iplatform/cpu -Iplatform/mpi $(MPI_INCLUDES) -DPARSER=read_$* $< -o $@ $(LIBRARIES)
fuzz:
	@MAKE_FUZZ=1 platform/deps.sh
	@$(MAKE) -j$(JOBS) --no-print-directory build/fuzz/files build/fuzz/tokens
	@for parser in files tokens; do \
	    mkdir -p build/fuzz/corpus-$$parser && echo "== $$parser, $(or $(SECONDS),60) s" && \
	    ASAN_OPTIONS=detect_leaks=0 TMPDIR=$$([ -w /dev/shm ] && echo /dev/shm || echo /tmp) build/fuzz/$$parser -max_total_time=$(or $(SECONDS),60) \
	        -timeout=5 -rss_limit_mb=2048 -print_final_stats=1 -verbosity=0 -artifact_prefix=build/fuzz/found-$$parser- \
	        build/fuzz/corpus-$$parser tests/seeds/$$parser || exit 1; \
	done
fuzz-config: deps
	@$(MAKE) -j$(JOBS) --no-print-directory $(BUILD)/train $(BUILD)/test_fuzz
	@BUILD=$(BUILD) PTDP_COMBINATIONS=$(or $(COUNT),100) PTDP_SEED=$(or $(SEED),1) $(BUILD)/test_fuzz --test-case="any combination*"

soak: deps
	@$(MAKE) -j$(JOBS) --no-print-directory $(BUILD)/train $(BUILD)/test_faults
	@BUILD=$(BUILD) OMP_WAIT_POLICY=passive $(BUILD)/test_faults --no-skip --test-case="soak*"

lab:
	@labs/make_lab "$(N)" "$(DIR)"
grade: deps
	@$(if $(LAB),,echo "make grade: this is no lab's copy; make grade N=1 grades the project itself" >&2; exit 2)
	@$(MAKE) -s -j$(JOBS) --no-print-directory $(BUILD)/test_$(word $(or $(LAB),1),$(LAB_TESTS))
	@BUILD=$(BUILD) LAB=$(LAB) labs/grade $(BUILD)/test_$(word $(or $(LAB),1),$(LAB_TESTS)) $(if $(JSON),--json)

# BENCH="kernels one parallel layouts checkpoints plan precision": only these tables. PYTHON: one that can import PyTorch
bench: deps
	@$(MAKE) -j$(JOBS) --no-print-directory $(BUILD)/bench $(BUILD)/plan $(if $(DEFINES),,bench-bf16)
	@BF16_BENCH=$(if $(DEFINES),,$(BUILD)-bf16/bench) $(BUILD)/bench $(BENCH)
bench-bf16:
	@$(MAKE) --no-print-directory PRECISION=bf16 $(BUILD)-bf16/bench

cuda:
	@command -v $(NVCC) >/dev/null || { echo "make cuda: there is no nvcc here; it comes with the CUDA Toolkit" >&2; exit 1; }
	@$(MAKE) -j$(JOBS) --no-print-directory BACKEND=cuda COMM=nccl CUDA_ARCH="$(ARCHS)" cuda-programs
	@$(MAKE) --no-print-directory BACKEND=cuda COMM=mpi CUDA_ARCH="$(ARCHS)" build/cuda-mpi/train
cuda-programs: $(patsubst %.cu,build/cuda/%,train.cu plan.cu bench.cu $(notdir $(wildcard tests/test_*.cu)))

gpu-carry:
	@tests/gpu_check pack build/carry
gpu-check:
	@tests/gpu_check

clean:
	rm -rf build train plan

.PHONY: always all help deps run test test-full build-tests fuzz fuzz-config soak lab grade bench bench-bf16 cuda cuda-programs gpu-carry gpu-check clean
.DELETE_ON_ERROR:
