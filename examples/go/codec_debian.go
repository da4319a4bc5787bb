//go:build debian

package main

import (
	"google.golang.org/grpc/encoding"
	"google.golang.org/protobuf/proto"
)

// Debian's grpc encodes with a protobuf library that is older than the messages that Debian's protoc-gen-go makes.
func init() { encoding.RegisterCodec(codec{}) }

type codec struct{}

func (codec) Name() string                              { return "proto" }
func (codec) Marshal(value interface{}) ([]byte, error) { return proto.Marshal(value.(proto.Message)) }
func (codec) Unmarshal(data []byte, value interface{}) error {
	return proto.Unmarshal(data, value.(proto.Message))
}
