"""Streams an answer over gRPC with the generated stubs of isthmus-protos: `python grpc_client.py [HOST:PORT]`."""

import os
import sys

import grpc
from isthmus.v1 import inference_service_pb2, inference_service_pb2_grpc

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
with grpc.insecure_channel(address) as channel:
    stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
    request = inference_service_pb2.InferenceServiceGenerateRequest(prompt="The capital of France is", max_tokens=16)
    # For routers that ask for an API key; others do not look at it.
    shown = (("authorization", f"Bearer {os.environ.get('ISTHMUS_API_KEY', '')}"),)
    for part in stub.Generate(request, timeout=60, metadata=shown):
        print(part.text, end="", flush=True)
print()
