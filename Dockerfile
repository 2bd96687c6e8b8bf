# syntax=docker/dockerfile:1
#
#   docker build -t outrider .                          CPU
#   docker build -t outrider --build-arg DEVICE=cuda .  NVIDIA GPU; run it with --gpus all
#
# No model is baked in: it is fetched on the first start and kept in the volume /models.

ARG PYTHON_VERSION=3.12

# Not the slim one: it has the C++ compiler that the operators are built with.
FROM python:${PYTHON_VERSION} AS build
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

# The dependencies are a layer of their own, which a change of the code does not touch.
COPY server/__init__.py server/
COPY engine/__init__.py engine/
RUN pip install --constraint constraints.txt .
COPY engine engine
COPY server server
RUN pip install --no-deps --force-reinstall .

# The operators lie beside the code, for every level of x86-64: the image needs no compiler.
WORKDIR /
RUN python -m engine.model.cpu_ops.build

FROM python:${PYTHON_VERSION}-slim
RUN groupadd --gid 10001 outrider \
    && useradd --uid 10001 --gid outrider --create-home outrider \
    && install --directory --owner outrider --group outrider /models
COPY --from=build /opt/outrider /opt/outrider
COPY configs /etc/outrider
ENV PATH="/opt/outrider/bin:${PATH}" \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/models/huggingface \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    OUTRIDER_HOST=0.0.0.0 \
    OUTRIDER_PORT=8000 \
    OUTRIDER_CACHE_DIR=/models/outrider
WORKDIR /home/outrider
USER 10001:10001
VOLUME /models
EXPOSE 8000
# The first start fetches and converts a model, which may take a while.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python", "-c", "import httpx, os; httpx.get(f'http://127.0.0.1:{os.environ[\"OUTRIDER_PORT\"]}/health', timeout=4).raise_for_status()"]
ENTRYPOINT ["outrider"]
CMD ["serve"]
