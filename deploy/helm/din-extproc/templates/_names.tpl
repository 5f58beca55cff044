{{- define "din.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "din.labels" -}}
app.kubernetes.io/name: din-extproc
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "din.allLabels" -}}
{{ include "din.labels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "din.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "din.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "din.name" .) }}
{{- end -}}

{{- define "din.redisSecret" -}}
{{ .Values.redis.existingSecret | default (printf "%s-redis" (include "din.name" .)) }}
{{- end -}}

{{/* din.yaml: the values, and the settings that only the chart knows. */}}
{{- define "din.config" -}}
{{- $gateway := dict "admin" (dict "address" "0.0.0.0:9090") -}}
{{- if eq .Values.mode "sidecar" -}}
{{- $_ := set $gateway "ext_proc" (dict "socket" "/run/din/ext_proc.sock") -}}
{{- $_ := set $gateway "access_log" (dict "address" "127.0.0.1:50052") -}}
{{- else -}}
{{- $_ := set $gateway "ext_proc" (dict "address" "0.0.0.0:50051") -}}
{{- $_ := set $gateway "access_log" (dict "address" "0.0.0.0:50052") -}}
{{- $_ := set $gateway "reached_at" (printf "%s-sidecar.%s.svc" (include "din.name" .) .Release.Namespace) -}}
{{- end -}}
{{- if .Values.registry.enabled -}}
{{- $_ := set $gateway "registry" (dict "address" "0.0.0.0:50060" "http_address" "0.0.0.0:50061" "node_tokens_file" "/etc/din-tokens/node-tokens.yaml") -}}
{{- end -}}
{{- if include "din.usesXds" . -}}
{{- $_ := set $gateway "xds" (dict "address" (ternary "127.0.0.1:50053" "0.0.0.0:50053" (eq .Values.mode "sidecar"))) -}}
{{- end -}}
{{- $own := dict "version" 1 "gateway" $gateway "store" (dict "url" "${DIN_REDIS_URL}") -}}
{{- if .Values.catalog -}}
{{- $_ := set $own "catalog" (dict "source" "models.json") -}}
{{- end -}}
{{- toYaml (mergeOverwrite (dict "envoy" (dict "listener" "0.0.0.0:10000")) (deepCopy .Values.config) $own) -}}
{{- end -}}

{{/* Not empty if nodes come and go while Envoy runs. */}}
{{- define "din.usesXds" -}}
{{- if .Values.registry.enabled -}}true{{- end -}}
{{- range .Values.config.pools -}}{{- if .discover -}}true{{- end -}}{{- end -}}
{{- end -}}

{{/* What the sidecar watches with its service account: resources by namespace. */}}
{{- define "din.watched" -}}
{{- $watched := dict -}}
{{- range .Values.config.pools -}}
{{- with (.discover | default dict).kubernetes -}}
{{- if not .kubeconfig -}}
{{- $resource := ternary "endpointslices" "pods" (hasKey . "service") -}}
{{- $_ := set $watched .namespace (append (get $watched .namespace | default list) $resource | uniq) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $watched -}}
{{- end -}}

{{- define "din.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{- define "din.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end -}}

{{/* The part that every pod of the chart has. */}}
{{- define "din.pod" -}}
serviceAccountName: {{ include "din.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ add .Values.drainSeconds 30 }}
securityContext:
  {{- include "din.podSecurity" . | nindent 2 }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.topologySpreadConstraints }}
topologySpreadConstraints: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "din.sidecarContainer" -}}
- name: sidecar
  image: {{ include "din.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args: [serve, --config, /etc/din/din.yaml, --drain-s, {{ .Values.drainSeconds | quote }}]
  env:
    {{- include "din.env" . | nindent 4 }}
  ports:
    - { name: admin, containerPort: 9090 }
    {{- if eq .Values.mode "separate" }}
    - { name: grpc-ext-proc, containerPort: 50051 }
    - { name: grpc-log, containerPort: 50052 }
    {{- end }}
    {{- if .Values.registry.enabled }}
    - { name: grpc-registry, containerPort: 50060 }
    - { name: http-registry, containerPort: 50061 }
    {{- end }}
  startupProbe: { httpGet: { path: /readyz, port: admin }, periodSeconds: 1, failureThreshold: 120 }
  livenessProbe: { httpGet: { path: /healthz, port: admin }, periodSeconds: 10, timeoutSeconds: 5 }
  readinessProbe: { httpGet: { path: /readyz, port: admin }, periodSeconds: 2 }
  resources: {{ toYaml .Values.resources.sidecar | nindent 4 }}
  securityContext:
    {{- include "din.containerSecurity" . | nindent 4 }}
  {{- if eq .Values.mode "sidecar" }}
  # Envoy accepts no new connections and finishes its requests; the sidecar runs until then.
  lifecycle:
    preStop: { exec: { command: [din-extproc, drain, --config, /etc/din/din.yaml, --at-most-s, {{ .Values.drainSeconds | quote }}] } }
  {{- else }}
  lifecycle: { preStop: { sleep: { seconds: 5 } } }
  {{- end }}
  volumeMounts:
    {{- include "din.configMounts" . | nindent 4 }}
    - { name: run, mountPath: /run/din }
    {{- if include "din.watched" . | fromYaml }}
    - { name: kubernetes, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true }
    {{- end }}
{{- end -}}

{{- define "din.env" -}}
- { name: DIN_REDIS_URL, valueFrom: { secretKeyRef: { name: {{ include "din.redisSecret" . }}, key: url } } }
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "din.configMounts" -}}
- { name: config, mountPath: /etc/din, readOnly: true }
{{- if .Values.registry.enabled }}
- { name: tokens, mountPath: /etc/din-tokens, readOnly: true }
{{- end }}
{{- end -}}

{{- define "din.configVolumes" -}}
- { name: config, configMap: { name: {{ include "din.name" . }} } }
- { name: run, emptyDir: { medium: Memory, sizeLimit: 1Mi } }
{{- if include "din.watched" . | fromYaml }}
# The token of the service account, for the sidecar's container alone.
- name: kubernetes
  projected:
    sources:
      - serviceAccountToken: { path: token, expirationSeconds: 3607 }
      - configMap: { name: kube-root-ca.crt, items: [{ key: ca.crt, path: ca.crt }] }
{{- end }}
{{- if .Values.registry.enabled }}
- { name: tokens, secret: { secretName: {{ required "registry.tokensSecret" .Values.registry.tokensSecret }} } }
{{- end }}
{{- end -}}
