# syntax=docker/dockerfile:1
#
#   docker build -t outrider .                          CPU
#   docker build -t outrider --build-arg DEVICE=cuda .  NVIDIA GPU; run it with --gpus all
#
# No model is baked in: it is fetched on the first start and kept in the volume /models.

ARG PYTHON_VERSION=3.12
# The same for both stages: what is built in one is loaded in the other.
ARG DEBIAN=trixie

# Not the slim one: it has the C++ compiler that the operators are built with.
FROM python:${PYTHON_VERSION}-${DEBIAN} AS build
ARG DEVICE=cpu
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/outrider
ENV PATH="/opt/outrider/bin:${PATH}"
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./

# torch first and by itself: for a CPU it comes from torch's own index, without the CUDA libraries.
RUN case "${DEVICE}" in \
      cpu) pip install --no-deps --constraint constraints.txt \
             --index-url https://download.pytorch.org/whl/cpu torch ;; \
      cuda) pip install --constraint constraints.txt torch ;; \
      *) echo "DEVICE must be cpu or cuda, got ${DEVICE}" >&2; exit 1 ;; \
    esac

# The dependencies are a layer of their own, which a change of the code does not touch. Whoever runs the image
# cannot add to them, so that what is optional is in it.
COPY server/__init__.py server/
COPY engine/__init__.py engine/
RUN case "${DEVICE}" in \
      cpu) pip install --constraint constraints.txt '.[fast]' ;; \
      cuda) pip install --constraint constraints.txt '.[fast,quantization]' ;; \
    esac
COPY engine engine
COPY server server
RUN pip install --no-deps --force-reinstall .

# The operators lie beside the code, for every level of x86-64: the image needs no compiler.
WORKDIR /
RUN python -m engine.model.cpu_ops.build

FROM python:${PYTHON_VERSION}-slim-${DEBIAN}
ARG DEVICE=cpu
# Triton, which writes the kernels for GPUs, compiles its launcher where it runs.
# hadolint ignore=DL3008
RUN if [ "${DEVICE}" = cuda ]; then \
      apt-get update \
      && apt-get install --yes --no-install-recommends gcc libc6-dev \
      && rm -rf /var/lib/apt/lists/*; \
    fi
RUN groupadd --gid 10001 outrider \
    && useradd --uid 10001 --gid outrider --create-home outrider \
    && install --directory --owner outrider --group outrider /models
COPY --from=build /opt/outrider /opt/outrider
COPY configs /etc/outrider
ENV PATH="/opt/outrider/bin:${PATH}" \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/models/huggingface \
    TRITON_CACHE_DIR=/models/triton \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    OUTRIDER_HOST=0.0.0.0 \
    OUTRIDER_PORT=8000 \
    OUTRIDER_CACHE_DIR=/models/outrider
WORKDIR /home/outrider
USER 10001:10001
# Here is no compiler to build them anew with.
RUN ["python", "-c", "import pathlib, sys; from engine.model.cpu_ops.build import load_operators; sys.exit(load_operators(pathlib.Path('/nowhere')) is None)"]
VOLUME /models
EXPOSE 8000
# The first start fetches and converts a model, which may take a while.
# Without httpx, which would ask the proxy that HTTP_PROXY names, and takes longer to import.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python", "-c", "import http.client, os, sys; server = http.client.HTTPConnection('127.0.0.1', int(os.environ['OUTRIDER_PORT']), timeout=4); server.request('GET', '/health'); sys.exit(server.getresponse().status != 200)"]
ENTRYPOINT ["outrider"]
CMD ["serve"]
